"""Machines whose clocks are wrong by seconds, both ways: what turns and trajectories went through still adds up.

Only durations come from other machines, so there is nothing to correct; a timestamp of theirs that crept in would be
found here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.hosts.local import LocalHost
from agentrl.journal.reader import JournalReader
from agentrl.recipe.load import load
from agentrl.records import Trajectory, Version
from agentrl.sandbox.launch import start_daemon
from agentrl.scheduler import events as news
from agentrl.serve.launch import start_engine
from agentrl.wiring.derive import model_path
from tests.cli import RECIPE, agentrl, left_behind, ran
from tests.unit.test_trace import crossing, slices

pytestmark = pytest.mark.live

SKEWS = {"e0": 5.0, "e1": -5.0, "sandboxes": -5.0}
SMALL = ("batch.groups=1", "batch.siblings=4", "window.groups=2", "engines.slots=1")
SLACK_S = 1e-6

_SKEWED = """#!{python}
import runpy, sys, time
right = time.time
time.time = lambda: right() + {skew}
assert sys.argv[1] == "-m"
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def skewed(folder: Path, name: str) -> LocalHost:
    """A host with an interpreter whose clock is off."""
    python = folder / f"python-{name}"
    python.write_text(_SKEWED.format(python=sys.executable, skew=SKEWS[name]))
    python.chmod(0o755)
    return LocalHost(name, python=str(python), home=str(folder))


@contextlib.asynccontextmanager
async def fleet(place: Path) -> AsyncIterator[list[str]]:
    """Two engines and a daemon that run already; what a run is told of them."""
    recipe = load(RECIPE, overrides=list(SMALL))
    token = place / "token"
    token.write_text("secret")
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for name in ("e0", "e1"):
            engine, _, process = await start_engine(
                skewed(place, name),
                recipe.engines,
                name=name,
                model_path=str(model_path(recipe)),
                version=Version(0),
                context_tokens=recipe.model.context_tokens,
                run_dir=str(place / name),
                token_file=str(token),
            )
            stack.push_async_callback(process.stop)
            stack.push_async_callback(engine.aclose)
            urls.append(engine.url)
        daemon = await start_daemon(
            skewed(place, "sandboxes"), recipe.sandbox, run_dir=str(place / "boxes"), label="skewed"
        )
        stack.push_async_callback(daemon.stop)
        told = [
            f"engines.attach={json.dumps(urls)}",
            f"engines.token_file={token}",
            f"sandbox.attach={place / 'boxes'}",
        ]
        yield [part for setting in (*SMALL, *told) for part in ("--set", setting)]


@pytest.mark.slow
def test_spans_add_up(tmp_path: Path) -> None:
    async def main() -> Any:
        async with fleet(tmp_path) as settings:
            argv = ("rollout", RECIPE, "--run-dir", tmp_path / "run", "--batches", "2", "--json", *settings)
            return await asyncio.to_thread(ran, tmp_path, *argv)

    done = asyncio.run(main())
    assert done.code == 0, done.err
    trajectories = of_the_run(tmp_path / "run")
    assert len(trajectories) >= 6
    assert {turn.place.engine for t in trajectories for turn in t.turns} == {"e0", "e1"}
    for trajectory in trajectories:
        adds_up(trajectory)
    in_the_trace(tmp_path / "run" / "trace.json", done.document["elapsed_s"])
    told = agentrl("report", tmp_path / "run", "--json")
    assert told.code == 0, told.err
    assert left_behind(tmp_path) == []


def of_the_run(folder: Path) -> list[Trajectory]:
    reader = JournalReader(folder / "run.sqlite")
    events = [news.decode(event) for _, event, _ in reader.events()]
    ended = [event.facts.attempt for event in events if isinstance(event, news.AttemptEnded)]
    return [kept for attempt in ended if (kept := reader.trajectory(attempt)) is not None]


def adds_up(trajectory: Trajectory) -> None:
    """What others measured fits into what the run's own clock saw pass, and is not nothing."""
    free = trajectory.began_s
    for turn in trajectory.turns:
        parts = (turn.queue_s, turn.prefill_s, turn.decode_s, turn.tool_wait_s, turn.tool_s)
        assert min(parts) >= 0
        assert 0 < sum(parts[:3]) <= turn.engine_s + SLACK_S
        assert turn.began_s >= free - SLACK_S
        free = turn.began_s + turn.engine_s + turn.tool_wait_s + turn.tool_s
    assert free + trajectory.verdict.queue_s + trajectory.verdict.verify_s <= trajectory.ended_s + SLACK_S
    assert trajectory.open_s > 0


def in_the_trace(path: Path, elapsed_s: float) -> None:
    """Every slice lies within the run; those of one track follow or hold one another."""
    events = json.loads(path.read_text())
    found = list(slices(events))
    assert len({row[:2] for row in found}) > 5
    for row in found:
        assert -1e3 <= row[3] <= row[4] <= elapsed_s * 1e6 + 1e5, row
    assert crossing(events) == []
