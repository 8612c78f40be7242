"""Where the screen's pictures come from: a live run's face on a real socket, and a journal played again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from agentrl.errors import UnavailableError, UserError
from agentrl.records import AttemptId, GroupId, Lane, LaneStatus, SandboxHostStatus, Version
from agentrl.runtime.api import Face
from agentrl.runtime.desk import TrainerDesk
from agentrl.runtime.effects import World
from agentrl.runtime.loop import Driver, Listener
from agentrl.runtime.recent import Recent
from agentrl.runtime.status import Frame, Life, picture
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim
from agentrl.tui.snapshot import snapshot
from agentrl.wiring import top
from agentrl.wiring.attach import FaceClient, LiveRun
from agentrl.wiring.reach import Look
from agentrl.wiring.top import LiveFeed, Recording
from tests.cli import agentrl
from tests.recordings import recorded
from tests.scenes import turn
from tests.unit.test_tui import words

POLICY = Policy(steps=4, groups=1, siblings=2, window_groups=2, window_attempts=4, bound=2)
ENGINE = news.EngineUp(engine="e0", epoch=0, version=Version(0), ranks=1, slots=4, kv_tokens=99)


# --- recorded ---------------------------------------------------------------------------------------------------------


def played(folder: Path, *, until: float = 0.0, speed: float = 1e6) -> list[Frame]:
    frames: list[Frame] = []
    feed = Recording(folder, until=until)
    feed.play(speed=speed, running=True)
    asyncio.run(asyncio.wait_for(feed.watch(frames.append), 60))
    return frames


def test_a_recording_is_played_to_its_end(tmp_path: Path) -> None:
    outcome = recorded(tmp_path)
    first, *_, last = played(tmp_path)
    assert first.status.now_s == 0.0
    assert (last.status.step, last.status.outcome, last.status.version) == (6, "done", 6)
    assert last.status.now_s == pytest.approx(outcome.elapsed_s, abs=1.0)
    assert "ends" in last.note
    assert len(last.status.recent) == 6
    assert 0 < last.status.waited_s < last.status.watched_s


def test_a_recording_may_begin_anywhere(tmp_path: Path) -> None:
    outcome = recorded(tmp_path)
    middle = outcome.elapsed_s / 2
    first = played(tmp_path, until=middle)[0]
    assert first.status.now_s == middle
    assert 0 < first.status.step < 6
    assert any(member.phase == "running" for group in first.status.groups for member in group.members)
    assert first.news[-1]["now"] <= middle
    [only] = played(tmp_path, until=float("inf"))
    assert only.status.outcome == "done"


def test_a_stopped_recording_waits(tmp_path: Path) -> None:
    recorded(tmp_path)
    frames: list[Frame] = []

    async def main() -> None:
        feed = Recording(tmp_path)
        feed.play(speed=1e6, running=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await feed.watch(frames.append)
        assert len(frames) == 1
        assert "recording" in await feed.pause(True)

    asyncio.run(main())


def test_a_recording_is_drawn(tmp_path: Path) -> None:
    recorded(tmp_path)
    said = words(asyncio.run(snapshot(Recording(tmp_path, until=float("inf")), (100, 30))))
    assert "step 6/6" in said
    assert "the run is over: done" in said


def test_the_command_writes_a_frame_without_a_terminal(tmp_path: Path) -> None:
    recorded(tmp_path)
    frame = tmp_path / "frame.svg"
    assert agentrl("top", tmp_path, "--at", "inf", "--snapshot", frame, "--size", "90x28").code == 0
    assert "step 6/6" in words(frame.read_text())


def test_the_command_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    recorded(tmp_path)
    for argv in (["--snapshot", tmp_path / "f.svg", "--size", "wide"], ["--snapshot", tmp_path / "no" / "f.svg"]):
        done = agentrl("top", tmp_path, *argv)
        assert done.code == 2, done.err
    assert agentrl("top", tmp_path / "none").code == 2
    assert agentrl("top", "http://127.0.0.1:1").code == 2


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.toml is missing"):
        Recording(tmp_path)


# --- live -------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run is asked again without the usual rest."""
    for pause in ("_LEAST_S", "_LONGEST_S", "_MOST_S"):
        monkeypatch.setattr(top, pause, 0.01)


def with_feed(
    body: Callable[[LiveFeed, Driver, Face, asyncio.Task[None]], Awaitable[None]], folder: str = "runs/first"
) -> None:
    """server: the run's face; cancelled, the run is over."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        desk = TrainerDesk(Version(0), loop.time)
        world = World(
            player=sim.SimPlayer(0, sim.KIND, {}, {}, loop.time),
            tasks=sim.SimTasks(),
            journal=sim.SimJournal(),  # type: ignore[arg-type]
            weights=sim.SimWeights(),
            trainer=desk,
            clock=loop.time,
            keep_versions=2,
            admin_s=1.0,
        )
        driver = Driver(Core(POLICY), world, [], Listener())
        bound: asyncio.Future[str] = loop.create_future()
        face = Face(driver, desk, "secret", bound.set_result)
        server = asyncio.ensure_future(face.service(0)(driver.post))
        run = LiveRun(folder=folder, url=await bound, token="secret")
        try:
            async with asyncio.timeout(30), FaceClient(run) as client:
                await body(LiveFeed("first", client, looked(run), run.folder), driver, face, server)
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    asyncio.run(main())


def looked(run: LiveRun) -> Look:
    async def look() -> LiveRun:
        return run

    return look


def said_by(driver: Driver, face: Face, event: news.Event) -> None:
    now = driver.world.clock()
    face.heard(now, event, driver.core.handle(event, now))


async def until(shown: asyncio.Queue[Frame], wanted: Callable[[Frame], object]) -> Frame:
    while not wanted(frame := await shown.get()):
        pass
    return frame


@contextlib.asynccontextmanager
async def watched(feed: LiveFeed) -> AsyncIterator[asyncio.Queue[Frame]]:
    shown: asyncio.Queue[Frame] = asyncio.Queue()
    watching = asyncio.ensure_future(feed.watch(shown.put_nowait))
    try:
        yield shown
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize(
    ("left", "outcome", "why"),
    [
        (None, "killed", "its process is gone"),
        ('{"outcome": "running", "detail": ""}', "killed", "its process is gone"),
        ('{"outcome": "no-progress", "detail": "waiting for g3.m1.t0"}', "no-progress", "waiting for g3.m1.t0"),
    ],
)
def test_a_live_run_is_followed_to_its_end(tmp_path: Path, left: str | None, outcome: str, why: str) -> None:
    if left is not None:
        (tmp_path / "summary.json").write_text(left)

    async def body(feed: LiveFeed, driver: Driver, face: Face, server: asyncio.Task[None]) -> None:
        async with watched(feed) as shown:
            assert (await shown.get()).status.engines == ()
            said_by(driver, face, ENGINE)
            frame = await until(shown, lambda frame: frame.news)
            assert frame.news[0]["event"]["type"] == "EngineUp"
            assert [engine.name for engine in frame.status.engines] == ["e0"]
            server.cancel()
            frame = await until(shown, lambda frame: frame.note)
            assert "--replay" in frame.note
            assert frame.status.outcome == outcome
            assert why in frame.status.blockers

    with_feed(body, folder=str(tmp_path))


def test_a_run_that_is_resumed_elsewhere_is_found_again() -> None:
    """One that nobody can see from here is called away, not over."""
    again: list[LiveRun] = []

    async def look() -> LiveRun:
        if not again:
            raise UnavailableError("no run is live there")
        return again[0]

    async def body(feed: LiveFeed, driver: Driver, face: Face, server: asyncio.Task[None]) -> None:
        feed._folder, feed._look = "", look
        async with watched(feed) as shown:
            await shown.get()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
            assert (await until(shown, lambda frame: frame.note)).status.outcome == "away"
            bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            resumed = Face(driver, TrainerDesk(Version(0), driver.world.clock), "another", bound.set_result)
            serving = asyncio.ensure_future(resumed.service(0)(driver.post))
            again.append(LiveRun(folder="", url=await bound, token="another"))
            try:
                assert (await until(shown, lambda frame: not frame.note)).status.outcome == ""
                await until(shown, lambda frame: resumed.stream.readers)
                said_by(driver, resumed, ENGINE)
                assert (await until(shown, lambda frame: frame.news)).news[0]["event"]["type"] == "EngineUp"
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    with_feed(body)


def test_what_an_attempt_did_comes_from_the_run_where_its_folder_is_not_here() -> None:
    async def body(feed: LiveFeed, driver: Driver, face: Face, server: asyncio.Task[None]) -> None:
        wanted, life = AttemptId(GroupId(7), 3, 1), Life(turns=(turn(0), turn(1)), open_s=0.5, ended_s=9.0)
        face.lives = lambda attempt: life if attempt == wanted else Life()
        feed._folder = ""
        assert await feed.life(wanted) == life
        assert await feed.life(AttemptId(GroupId(1), 0, 0)) == Life()

    with_feed(body)


def test_a_watcher_that_leaves_is_no_error_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def body(feed: LiveFeed, driver: Driver, face: Face, server: asyncio.Task[None]) -> None:
        async with watched(feed) as shown:
            await shown.get()
            said_by(driver, face, ENGINE)
            await until(shown, lambda frame: frame.news)
        while face.stream.readers:  # it is noticed when something is written
            face.stream.publish(1.0, news.Tick(), [])
            await asyncio.sleep(0)

    with_feed(body)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_pause_and_drain_reach_the_run() -> None:
    async def body(feed: LiveFeed, driver: Driver, face: Face, server: asyncio.Task[None]) -> None:
        assert "paused" in await feed.pause(True)
        assert await feed.pause(False) == "goes on"
        assert "drains" in await feed.drain()
        asked = [driver.inbox.get_nowait() for _ in range(3)]
        assert asked == [news.PauseAsked(on=True), news.PauseAsked(on=False), news.DrainAsked()]
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        assert "not live" in await feed.drain()

    with_feed(body)


def test_what_a_sandbox_host_says_of_its_lanes_is_in_the_picture() -> None:
    lane = LaneStatus(lane=Lane.VERIFY, cap=4, running=4, queued=7, cpus=(2, 3))
    said = SandboxHostStatus(name="local", backend="namespace", isolation="", live=5, lanes=(lane,))

    async def body(feed: LiveFeed, driver: Driver, face: Face, server: asyncio.Task[None]) -> None:
        said_by(driver, face, news.SandboxHostUp(host="local", capacity=9))
        said_by(driver, face, news.SandboxHostLoads(host="local", said=said))
        frames: asyncio.Queue[Frame] = asyncio.Queue()
        watching = asyncio.ensure_future(feed.watch(frames.put_nowait))
        assert (await frames.get()).status.sandboxes == (said,)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    with_feed(body)


# --- what only time shows ---------------------------------------------------------------------------------------------


def test_who_went_down_is_remembered_until_it_is_back() -> None:
    core, recent = Core(POLICY), Recent()

    def hear(now: float, event: news.Event) -> list[orders.Command]:
        commands = core.handle(event, now)
        recent.heard(now, event, commands, core)
        return commands

    hear(0.0, news.Resumed(steps=4))
    hear(1.0, ENGINE)
    hear(1.0, news.SandboxHostUp(host="h0", capacity=4))
    hear(5.0, news.SandboxHostDown(host="h0", reason="no answer"))
    [gone] = picture(core, 9.0, recent).down
    assert (gone.name, gone.kind, gone.at_s, gone.reason) == ("h0", "sandbox host", 5.0, "no answer")
    hear(6.0, news.EngineDown(engine="e0", epoch=0, reason="killed"))
    assert {d.name for d in picture(core, 9.0, recent).down} == {"h0", "e0"}
    hear(7.0, news.SandboxHostUp(host="h0", capacity=4))
    assert [d.name for d in picture(core, 9.0, recent).down] == ["e0"]
    hear(100.0, news.Resumed(steps=4))
    resumed = picture(core, 103.0, recent)
    assert (resumed.down, resumed.trainer, resumed.trainer_for_s) == ((), "absent", 3.0)


def test_machines_are_named_and_a_lost_one_as_well() -> None:
    core, recent = Core(POLICY), Recent()

    def hear(now: float, event: news.Event) -> None:
        recent.heard(now, event, core.handle(event, now), core)

    hear(0.0, news.Resumed(steps=4))
    hear(1.0, msgspec.structs.replace(ENGINE, host="gpu1"))
    assert [engine.host for engine in picture(core, 2.0, recent).engines] == ["gpu1"]
    hear(3.0, news.EngineDown(engine="e0", epoch=0, reason="host gpu1 is lost: timed out", link="gpu1"))
    [gone] = picture(core, 9.0, recent).down
    assert (gone.name, gone.link, gone.at_s) == ("e0", "gpu1", 3.0)


def test_waits_add_up_as_the_summary_defines_them(tmp_path: Path) -> None:
    """Steps' waits, the first batch's left out, are the trainer's whole wait; lengths are of whole groups."""
    recorded(tmp_path, seed=5)
    status = played(tmp_path, until=float("inf"))[0].status
    assert status.waited_s == pytest.approx(sum(step.waited_s for step in status.recent[1:]))
    assert [step.batch for step in status.recent] == list(range(6))
    assert all(step.train_s > 0 and sum(groups for _, groups in step.ages) == 2 for step in status.recent)
    assert status.length_ratio is not None
    assert 0.3 < status.length_ratio < 3.0
