"""An hour of a run's events, replayed into the screen: what it keeps does not grow with the run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from agentrl.journal.reader import JournalReader
from agentrl.recipe.load import load_sim
from agentrl.records import AttemptId
from agentrl.runtime.recent import Recent
from agentrl.runtime.status import Frame, Life
from agentrl.scheduler.core import Core
from agentrl.tui.app import Top
from agentrl.tui.widgets import Panel
from agentrl.wiring.recording import keep, policy_in
from agentrl.wiring.top import _Playing

FLEET = """
name = "hour"
steps = 70
[fleet]
hosts = 2
cpus_per_host = 32
serving_cpus = 8
[fleet.measured]
step_s = 0.02
sequence_s = 0.001
prefill_token_s = 0.0001
stage_s = 2.0
swap_s = 1.0
ranks = 2
slots = 16
kv_tokens = 600000
[workload.overrides]
turns = 0.3
[policy]
groups = 2
siblings = 8
window_groups = 6
[trainer]
step_s = 8.0
"""
EVERY_S = 10.0  # of the run, between two frames
MOMENTS = (600.0, 1_800.0, 2_700.0, 3_600.0)


class Hour:
    """A feed that shows the run's frames one after the other, without the waits between them."""

    name, live = "hour", False

    def __init__(self, folder: Path) -> None:
        self._playing = _Playing(Core(policy_in(folder)), Recent(), JournalReader(folder / "run.sqlite").events())
        self.at = 0.0

    async def watch(self, show: Callable[[Frame], None]) -> None:
        await asyncio.Event().wait()

    def frames(self, until: float) -> Iterator[Frame]:
        while self.at < until:
            self.at = self._playing.forward(self.at + EVERY_S)
            assert not self._playing.ended
            yield self._playing.shown(self.at)

    async def pause(self, on: bool) -> str:
        return ""

    async def drain(self) -> str:
        return ""

    async def life(self, attempt: AttemptId) -> Life:
        return Life()

    def play(self, *, speed: float, running: bool) -> None: ...


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_an_hour_on_the_screen_leaves_it_as_small_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "sim.toml").write_text(FLEET)
    keep(load_sim(tmp_path / "sim.toml"), 0, tmp_path / "run")
    feed, held, memory = Hour(tmp_path / "run"), list[int](), list[float]()

    async def main() -> None:
        app = Top(feed)
        async with app.run_test(size=(120, 40)) as pilot:
            for until in MOMENTS:
                for frame in feed.frames(until):
                    app.show(frame)
                    for panel in app.screen.query(Panel):
                        panel.render()
                await pilot.pause()
                held.append(objects())
                memory.append(psutil.Process().memory_info().rss / 1e6)

    asyncio.run(main())
    for at, count, rss in zip(MOMENTS, held, memory, strict=True):
        print(f"after {at:.0f} s of the run: {count} objects, {rss:.0f} MB resident")
    assert held[-1] < 1.02 * held[1], held
