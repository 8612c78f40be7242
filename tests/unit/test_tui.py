"""The screen of `agentrl top`, driven by its keys, without a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from xml.etree import ElementTree

import msgspec
import pytest
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import Input

from agentrl.records import AttemptId, GroupId
from agentrl.runtime.status import Frame, Status
from agentrl.scheduler.sizing import Limit
from agentrl.tui import draw, fleet, groups, log
from agentrl.tui.app import Top
from agentrl.tui.screens import Ask, GroupScreen, Help, TurnsScreen
from agentrl.tui.snapshot import snapshot
from agentrl.tui.widgets import Panel
from tests import scenes
from tests.scenes import SCENES, SNAPSHOTS, StillFeed, frame_text

Body = Callable[[Top, Pilot[None], StillFeed], Awaitable[None]]


def driven(body: Body, *frames: Status, live: bool = True, size: tuple[int, int] = (80, 24)) -> None:
    async def main() -> None:
        feed = StillFeed(*(frames or (scenes.straggler(),)), live=live)
        app = Top(feed)
        async with asyncio.timeout(60), app.run_test(size=size) as pilot:
            await app.pictured.wait()
            await pilot.pause()
            await body(app, pilot, feed)

    asyncio.run(main())


def shown(app: Top, name: str) -> str:
    """A panel's text as it is drawn now."""
    return str(app.screen.query_one(f"#{name}", Panel).render())


def words(svg: str) -> str:
    return " ".join("".join(ElementTree.fromstring(svg).itertext()).split())


# --- what is on it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (200, 60)], ids=str)
@pytest.mark.parametrize("name", SCENES)
def test_every_scene_is_drawn_whole_and_as_it_was(name: str, size: tuple[int, int]) -> None:
    """Against tests/snapshots/; `make pictures` draws those anew."""
    drawn = asyncio.run(snapshot(StillFeed(SCENES[name]()), size))
    assert frame_text(drawn) == (SNAPSHOTS / f"{name}-{size[0]}x{size[1]}.txt").read_text()
    said = words(drawn)
    for title in ("1 next batch", "2 freshness", "3 engines", "4 sandboxes", "5 groups", "6 advice and events"):
        assert title in said
    assert "swe-20260101-120000" in said
    assert "q quit" in said


def test_one_look_says_who_waits_why_and_what_to_do() -> None:
    said = words(asyncio.run(snapshot(StillFeed(scenes.straggler()), (80, 24))))
    for part in ("TRAINER WAITS 1m34", "g335.m7.t0 runs 312 s", "e0/1", "batch.spare", "7/8 ready", "idle 25%"):
        assert part in said


def test_a_publication_and_a_lost_host_are_named() -> None:
    said = " ".join(frame_text(asyncio.run(snapshot(StillFeed(scenes.rolling()), (80, 24)))).split())
    assert "v42 on 1 of 3 engines: e1 swapping, e2 staging" in said
    assert "e1 v41 0/64 38 60% swaps" in said
    assert "h1 down 33s" in words(asyncio.run(snapshot(StillFeed(scenes.lost_host()), (80, 24))))


def test_what_holds_the_window_is_said_where_there_is_room() -> None:
    limits = (
        Limit(of="W", name="fresh", value=23.6, said="the oldest 2 % of groups see 1.36 W/B versions, K is 4"),
        Limit(of="W", name="filled", value=40.0, said="192 conversations"),
        Limit(of="C", name="slots", value=201.0, said="192 slots, in one for 96% of a life"),
    )
    status = msgspec.structs.replace(scenes.healthy(), auto_window=True, window_limits=limits)
    small, large = (frame_text(asyncio.run(snapshot(StillFeed(status), size))) for size in ((80, 24), (200, 60)))
    assert "window 19/24 auto" in small
    assert "window ≤ 24 (fresh): the oldest 2 % of groups see 1.36 W/B versions, K is 4" in large
    assert "conversations ≤ 201 (slots): 192 slots" in large
    assert "filled" not in large


def test_engines_of_other_machines_are_shown_with_them() -> None:
    far = msgspec.structs.replace(scenes.healthy(), engines=(scenes.engine("e0", 42, host="gpu1"),))
    assert "serving" in words(asyncio.run(snapshot(StillFeed(far), (200, 60))))
    assert "gpu1" in words(asyncio.run(snapshot(StillFeed(far), (80, 24))))


@pytest.mark.parametrize("theme", ["terminal", "dark", "light"])
def test_every_theme_draws(theme: str) -> None:
    async def main() -> None:
        app = Top(StillFeed(scenes.healthy()), theme=theme)
        async with asyncio.timeout(60), app.run_test(size=(80, 24)) as pilot:
            before = app.theme
            seen = set()
            for _ in range(3):
                await pilot.press("t")
                seen.add(app.theme)
            assert (app.theme, len(seen)) == (before, 3)

    asyncio.run(main())


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (30, 10)], ids=str)
def test_thousands_of_attempts(size: tuple[int, int]) -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("end", "enter", "escape", "3", "z", "end", "z", "s")
        assert len(app.shown_groups()) == 128

    driven(body, scenes.crowded(2_048), size=size)


def test_before_there_is_a_picture() -> None:
    async def main() -> None:
        app = Top(StillFeed())
        async with asyncio.timeout(60), app.run_test(size=(80, 24)) as pilot:
            await pilot.press("s", "p", "enter")
            assert "no picture yet" in shown(app, "head")

    asyncio.run(main())


def test_a_run_that_is_over_or_empty() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        assert "done" in shown(app, "batch")
        assert "no engine" in shown(app, "freshness")
        assert "no engine is up" in shown(app, "engines")

    over = msgspec.structs.replace(scenes.healthy(), outcome="done", groups=(), engines=(), recent=(), sandboxes=())
    driven(body, over)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_numbers_and_tab_go_from_panel_to_panel() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        for key, name in enumerate(("batch", "freshness", "engines", "lanes", "groups", "log"), start=1):
            await pilot.press(str(key))
            assert app.focused is app.query_one(f"#{name}")
        await pilot.press("1", "tab")
        assert app.focused is app.query_one("#freshness")
        await pilot.press("shift+tab")
        assert app.focused is app.query_one("#batch")

    driven(body)


def test_z_gives_a_panel_the_whole_screen() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("3", "z")
        await pilot.pause()
        assert app.query_one("#engines").size.height > 15
        await pilot.press("5")
        await pilot.pause()
        assert app.screen.maximized is app.query_one("#groups")
        await pilot.press("escape")
        assert app.screen.maximized is None

    driven(body)


def test_s_sorts() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        seen = [app.shown_groups()]
        for name in list(groups.SORTS)[1:]:
            await pilot.press("s")
            seen.append(app.shown_groups())
            assert name in str(app.query_one("#groups", Panel).border_title)
        assert seen[0][0].id == 335
        assert [g.id for g in seen[1]] == sorted(g.id for g in seen[1])
        assert all({g.id for g in each} == {g.id for g in seen[0]} for each in seen)
        await pilot.press("s")
        assert app.shown_groups() == seen[0]

    driven(body)


def test_slash_filters_groups_and_log() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("slash", *"sympy", "enter")
        assert {g.task for g in app.shown_groups()} == {"swe/sympy-20154"}
        assert "staged" not in shown(app, "log")
        assert app.focused is app.query_one("#groups")
        await pilot.press("escape")
        assert len(app.shown_groups()) == 12
        await pilot.press("slash", *"h1 ", "escape")
        assert not app.query_one("#filter", Input).display

    driven(body)


def test_enter_drills_to_attempts_and_turns() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, GroupScreen)
        assert "g335.m7.t0 running" in " ".join(shown(app, "drill").split())
        await pilot.press("end", "enter")
        await pilot.pause()
        assert isinstance(app.screen, TurnsScreen)
        assert feed.asked[-1] == AttemptId(GroupId(335), 7, 0)
        said = " ".join(shown(app, "drill").split())
        for part in ("pytest -q", "open 2.2s", "verify 2.7s", "batch 40s", "for its batch"):
            assert part in said
        await pilot.press("escape", "escape")
        assert not isinstance(app.screen, GroupScreen | TurnsScreen)

    driven(body)


def test_the_last_picture_of_a_group_stays_when_it_is_gone() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("enter")
        await pilot.pause()
        app.show(Frame(status=msgspec.structs.replace(scenes.straggler(), groups=())))
        assert "g335.m7.t0" in shown(app, "drill")

    driven(body)


def test_p_pauses_and_goes_on() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("p")
        await pilot.pause()
        assert feed.asked[-1] == ("pause", True)
        app.show(Frame(status=msgspec.structs.replace(scenes.straggler(), paused=True)))
        assert "paused" in shown(app, "verdict")
        await pilot.press("p")
        await pilot.pause()
        assert feed.asked[-1] == ("pause", False)

    driven(body)


def test_d_drains_only_after_a_yes() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("d")
        await pilot.pause()
        assert isinstance(app.screen, Ask)
        await pilot.press("p", "n")
        await pilot.pause()
        assert "drain" not in feed.asked
        await pilot.press("d")
        await pilot.pause()
        await pilot.press("y")
        await pilot.pause()
        assert feed.asked[-1] == "drain"

    driven(body)


def test_a_recording_is_played_and_not_drained() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("p", "d")
        assert feed.asked == [(1.0, True)]
        await pilot.press("space", "plus", "minus", "minus", "space")
        assert feed.asked[1:] == [(1.0, False), (2.0, False), (1.0, False), (0.5, False), (0.5, True)]
        assert "recording, speed 0.5" in shown(app, "head")

    driven(body, live=False)


def test_help_and_quit() -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press("question_mark")
        assert isinstance(app.screen, Help)
        await pilot.press("escape")
        assert not isinstance(app.screen, Help)
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    driven(body)


def bound() -> list[tuple[str, str]]:
    """(where, key) of every key that we listen to. Textual has some of its own."""
    kinds = (Top, Panel, GroupScreen, TurnsScreen, Ask, Help)
    ours = [(kind.__name__, base) for kind in kinds for base in kind.__mro__ if base.__module__.startswith("agentrl")]
    bindings = [(name, binding) for name, base in ours for binding in base.__dict__.get("BINDINGS", ())]
    return [(name, key) for name, binding in bindings for key in binding.key.split(",")]


FIRST = {  # pressed before, so that there is something to leave, to go back from, or to move away from
    ("Top", "escape"): ("z",),
    ("Top", "5"): ("1",),
    **{("Panel", key): ("end",) for key in ("up", "k", "pageup", "home")},
}
OPENED = {
    "GroupScreen": ("enter",),
    "TurnsScreen": ("enter", "end", "enter"),
    "Ask": ("d",),
    "Help": ("question_mark",),
}
PLAYED = ("space", "plus", "minus", "equals_sign")


def state(app: Top, feed: StillFeed) -> tuple[object, ...]:
    panels = [(panel.id, panel.row, panel.window) for panel in app.screen.query(Panel)]
    maximized = app.screen.maximized.id if app.screen.maximized else None
    focused = app.focused.id if app.focused else None
    filtering = app.screen_stack[0].query_one("#filter").display
    return (
        *([type(screen) for screen in app.screen_stack], panels, maximized, focused, filtering),
        *(app.theme, app._sort, app._speed, app._going, len(feed.asked), app.is_running),
    )


@pytest.mark.parametrize(("where", "key"), bound(), ids=str)
def test_every_key_does_something(where: str, key: str) -> None:
    async def body(app: Top, pilot: Pilot[None], feed: StillFeed) -> None:
        await pilot.press(*OPENED.get(where, ()), *FIRST.get((where, key), ()))
        await pilot.pause()
        before = state(app, feed)
        await pilot.press(key)
        await pilot.pause()
        assert state(app, feed) != before

    driven(body, live=key not in PLAYED)


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_times_and_numbers_are_short() -> None:
    assert [draw.took(s) for s in (0.04, 9.96, 59.4, 75.0, 7_260.0)] == ["0.0s", "10s", "59s", "1m15", "2h01"]
    assert [draw.count(n) for n in (0, 950, 9_500, 95_000, 1_200_000)] == ["0", "950", "9.5k", "95k", "1.2M"]
    assert fleet.cpu_list([5, 0, 1, 2]) == "0-2,5"


def test_a_line_is_as_wide_as_its_place() -> None:
    for width in range(1, 60):
        rows = draw.columns([["a long name", Text("7/8"), "and what is left"]], ("name", ">done", "rest"), width)
        assert {row.cell_len for row in rows} == {width}
        assert draw.ends("left", "right", max(7, width)).cell_len == max(7, width)
        assert draw.bar(0.37, width).cell_len == width


def test_events_as_lines() -> None:
    told = [entry for said in scenes.NEWS for entry in log.entries(said)]
    assert [entry[1] for entry in told] == [
        "step on batch 40 made v42 in 8.9s",
        "engine e0 staged v42",
        "engine e0 serves v42",
        "engine e1 swaps to v42",
        "g331.m2.t0 failed (infra): h1 does not answer",
        "g333.m4.t0 ended: reward 1.00, 9 turns, 5120 tokens, submitted",
    ]
    assert log.entries({"now": 1.0, "event": {"type": "Tick"}, "commands": []}) == []
