"""The trace of a run: JSON at any moment, tracks without collisions, times that add up; and the picture of it."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError, UserError
from agentrl.recipe.load import load_sim
from agentrl.records import AttemptId, GroupId, Lane, TrajectoryFacts, Version
from agentrl.report import tracepicture
from agentrl.runtime.trace import Trace
from agentrl.runtime.tracefile import TraceFile
from agentrl.wiring.recording import keep
from agentrl.wiring.replay import replay
from agentrl.wiring.story import read_story
from tests.cli import agentrl
from tests.scenes import turn
from tests.unit.test_top import played

FLEET = """
name = "small"
steps = 4
[fleet]
hosts = 2
cpus_per_host = 32
[workload.overrides]
turns = 0.2
[policy]
groups = 2
siblings = 6
window_groups = 4
[trainer]
step_s = 20.0
"""


@pytest.fixture(scope="module")
def fleet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the simulated fleet, kept as a folder."""
    below = tmp_path_factory.mktemp("fleet")
    (below / "sim.toml").write_text(FLEET)
    assert keep(load_sim(below / "sim.toml"), 0, below / "run").outcome == "done"
    return below / "run"


def slices(events: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, float, float]]:
    """(process, track, name, began, ended), microseconds."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    for e in events:
        if e.get("ph") == "X":
            yield processes[e["pid"]], tracks[e["pid"], e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]


def test_a_run_is_there_from_the_trainer_down_to_the_lanes(fleet_run: Path) -> None:
    found = list(slices(json.loads((fleet_run / "trace.json").read_text())))
    assert {process for process, *_ in found} >= {"trainer", "publications", "engine e0", "host h0", "attempts"}
    names = {name.partition(" ")[0] for process, _, name, *_ in found if process == "attempts"}
    assert names >= {"turn", "prefill", "decode", "tool", "open", "verify:", "waits", "trains"}
    assert {track.partition(" .")[0] for process, track, *_ in found if process == "host h0"} >= {"command", "verify"}
    assert {"steps"} == {track for process, track, *_ in found if process == "trainer"}
    live = [
        name for process, track, name, *_ in found if (process, track) == ("publications", "until every engine has it")
    ]
    assert live == sorted(live, key=lambda name: int(name[1:]))


def crossing(events: list[dict[str, Any]]) -> list[str]:
    """Slices that reach out of the one that they begin in, if by a microsecond: Perfetto drops them. Of two that begin
    together the one that was written first is the outer one."""
    by_track: dict[tuple[str, str], list[tuple[float, int, float, str]]] = defaultdict(list)
    for order, (process, track, name, began, ended) in enumerate(slices(events)):
        by_track[process, track].append((began, order, ended, name))
    found = []
    for track, rows in by_track.items():
        around: list[float] = []
        for began, _, ended, name in sorted(rows):
            while around and around[-1] <= began:
                around.pop()
            if around and ended > around[-1]:
                found.append(f"{track}: {name} at {began}")
            around.append(ended)
    return found


def test_slices_of_one_track_lie_side_by_side_or_within_each_other(fleet_run: Path) -> None:
    assert crossing(json.loads((fleet_run / "trace.json").read_text())) == []


@given(
    began=st.floats(0, 1e6),
    parts=st.tuples(*[st.floats(0, 100)] * 5),
    late=st.floats(-1.0, 1.0),
    life=st.tuples(*[st.floats(0, 10)] * 5),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_the_clocks_measured_slices_do_not_cross(
    began: float, parts: tuple[float, ...], late: float, life: tuple[float, ...]
) -> None:
    """late: how far the run's clock is from the sum of what the others measured."""
    queue, prefill, decode, wait, tool = parts
    one = msgspec.structs.replace(
        turn(0),
        began_s=began,
        engine_s=queue + prefill + decode,
        queue_s=queue,
        prefill_s=prefill,
        decode_s=decode,
        tool_wait_s=wait,
        tool_s=tool,
        lane=Lane.COMMAND,
        command="true",
    )
    attempt = AttemptId(GroupId(1), 0, 0)
    now = max(began + one.engine_s, began + sum(parts) + late)
    with tempfile.TemporaryDirectory() as below:
        trace = Trace(Path(below) / "trace.json")
        trace.turn(attempt, one, now)
        trace._hosts[attempt] = "h0"
        open_s, open_wait_s, verify_wait_s, verify_s, more_s = life
        facts = TrajectoryFacts(
            attempt=attempt,
            reward=1.0,
            tokens=90,
            generated=60,
            versions=((Version(0), 60),),
            open_s=open_s,
            open_wait_s=open_wait_s,
            verify_wait_s=verify_wait_s,
            verify_s=verify_s,
        )
        trace._ended(facts, now + more_s)
        trace.close()
        assert crossing(json.loads((Path(below) / "trace.json").read_text())) == []


def test_a_conversation_is_accounted_for_from_its_opening_to_its_training(fleet_run: Path) -> None:
    """Between its first and its last slice no more than a hundredth is unaccounted for."""
    parts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    trained = set()
    for process, track, name, began, ended in slices(json.loads((fleet_run / "trace.json").read_text())):
        if process == "attempts" and not name.startswith("turn"):
            parts[track].append((began, ended))
            trained |= {track} if name.startswith("trains") else set()
    assert trained
    for track in trained:
        life = max(ended for _, ended in parts[track]) - min(began for began, _ in parts[track])
        assert sum(ended - began for began, ended in parts[track]) == pytest.approx(life, rel=0.01)


def test_it_is_json_after_every_kill_and_its_tracks_keep_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def write() -> None:
        trace = Trace(path)
        for member in range(3):
            trace.turn(AttemptId(GroupId(1), member, 0), turn(0), 9.0)
        trace.close()

    write()
    whole = path.read_bytes()
    first = [e for e in json.loads(whole) if e.get("ph") == "M"]
    for cut in (0, 1, 2, 40, len(whole) // 2, len(whole) - 5, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:cut])
        write()
        again = json.loads(path.read_bytes())
        named = [e for e in again if e.get("name") == "thread_name"]
        assert len({(e["pid"], e["tid"]) for e in named}) == len({(e["pid"], e["args"]["name"]) for e in named})
        assert len([e for e in again if e.get("ph") == "X"]) >= len(
            [e for e in json.loads(whole) if e.get("ph") == "X"]
        )
        if cut > len(whole) - 10:
            assert [e for e in again if e.get("ph") == "M"] == first


def test_a_full_trace_keeps_the_steps_and_says_so(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", limit_bytes=2_000)
    for step in range(200):
        file.slice("attempts", "g1.m0", "decode", step, step + 0.5, {}, bulk=True)
        if step % 20 == 0:
            file.slice("trainer", "steps", f"step v{step}", step, step + 1.0, {})
    file.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert sum(e.get("name") == "decode" for e in events) < 40
    assert sum(str(e.get("name")).startswith("step") for e in events) == 10
    assert sum("full" in str(e.get("name")) for e in events) == 1


def test_a_simulated_run_is_reported_and_replayed_like_a_live_one(fleet_run: Path) -> None:
    story = read_story(fleet_run)
    assert (story.outcome, len(story.steps)) == ("done", 4)
    assert all(story.stages[name] > 0 for name in ("opening", "decode", "tool", "verifying"))
    assert replay(fleet_run, laws=True).identical
    with pytest.raises(UserError, match="there is a run already"):
        keep(load_sim(fleet_run / "recipe.toml"), 0, fleet_run)


def test_a_recording_shows_the_lanes(fleet_run: Path) -> None:
    frames = played(fleet_run, until=60.0, speed=1e6)
    hosts = {host.name: host for host in frames[0].status.sandboxes}
    assert set(hosts) == {"h0", "h1"}
    assert any(lane.done for host in hosts.values() for lane in host.lanes)
    assert all(lane.cpus for host in hosts.values() for lane in host.lanes)


def test_a_picture_of_it(fleet_run: Path, tmp_path: Path) -> None:
    done = agentrl("report", fleet_run, "--trace", tmp_path / "t.png", "--from", "0", "--to", "60", "--json")
    assert done.code == 0, done.err
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert done.document["slices"] > 100
    assert agentrl("report", fleet_run, "--trace", tmp_path / "t.png", "--from", "9", "--to", "5").code == 2


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trace here"):
        tracepicture.read(tmp_path / "trace.json")
    (tmp_path / "trace.json").write_text("[\nnonsense,\n")
    with pytest.raises(DataError, match="line 2"):
        tracepicture.read(tmp_path / "trace.json")
    (tmp_path / "trace.json").write_text('[\n{"ph": "M", "pi')
    assert tracepicture.read(tmp_path / "trace.json") == []
