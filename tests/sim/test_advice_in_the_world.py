"""Advice caused in the simulated world: one thing is wrong there, and it is said; where nothing is, nothing is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from agentrl.recipe.load import load_sim
from agentrl.runtime.lag import LoopLag
from agentrl.runtime.loop import Listener
from agentrl.runtime.recent import Recent
from agentrl.runtime.status import Status, picture
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim
from agentrl.sim.clock import VirtualLoop
from agentrl.sim.clock import run as virtual
from agentrl.tui.advice import advise
from agentrl.wiring.fleet import Fleet, Options, build_fleet
from agentrl.wiring.sim import RudeRun
from tests.unit.test_advice import ALARMS, HINTS

LOSS = {"engine-down", "host-down", "failing", "trainer-absent", "quiet", "engine-stuck", "loop-lag"}


class Watcher:
    """Looks at the run once a second, as the screen does. `told`: names of all advice it was given."""

    def __init__(self) -> None:
        self.recent = Recent()
        self.told: set[str] = set()
        self._past = deque[Status](maxlen=120)

    def look(self, core: Core, now: float, lag_s: float = 0.0) -> None:
        status = picture(core, now, self.recent, loop_lag_s=lag_s)
        self.told |= {advice.name for advice in advise([*self._past, status])}
        self._past.append(msgspec.structs.replace(status, groups=()))


# --- the rude world: what is lost -------------------------------------------------------------------------------------

POLICY = Policy(
    steps=12,
    groups=2,
    siblings=4,
    window_groups=6,
    window_attempts=24,
    bound=4,
    retries=6,
    attempt_timeout_s=200.0,
    stall_s=2000.0,
)
RUDE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("engine-down", {}, {"engine_every_s": 40.0}),
    ("host-down", {}, {"host_every_s": 40.0}),
    ("straggler", {}, {"hang": 0.05}),
    ("failing", {}, {"fail": 0.3}),
    ("trainer-slow", {"steps": 24}, {}),
    ("trainer-absent", {"steps": 4, "stall_s": 300.0}, {"trainer_every_s": 30.0, "trainer_back_s": 0.0}),
    ("quiet", {"steps": 4, "stall_s": 300.0}, {"trainer_every_s": 30.0, "trainer_back_s": 0.0}),
    ("attempts-bound", {"window_attempts": 2}, {}),
    ("widen", {"window_groups": 2, "window_attempts": 64}, {}),
    ("stale", {"bound": 1, "window_groups": 12, "window_attempts": 48}, {}),
    ("near-K", {"bound": 1, "window_groups": 12, "window_attempts": 48}, {}),
]


def told(policy: Policy, rude: dict[str, Any], seed: int = 2) -> set[str]:
    outcome = virtual(RudeRun(seed, policy=policy, rude=replace(sim.KIND, **rude)).play())
    core, watcher, looked = Core(policy), Watcher(), 0.0
    for now, data, _ in outcome.journal:
        while looked + 1.0 < now:
            looked += 1.0
            watcher.look(core, looked)
        event = news.decode(data)
        watcher.recent.heard(now, event, core.handle(event, now), core)
    return watcher.told


@pytest.mark.parametrize(("name", "policy", "rude"), RUDE, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_said(name: str, policy: dict[str, Any], rude: dict[str, Any]) -> None:
    assert name in told(msgspec.structs.replace(POLICY, **policy), rude)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kind_world_raises_no_alarm_of_loss(seed: int) -> None:
    assert not told(POLICY, {}, seed) & LOSS


# --- the fleet: what is too little or too much ------------------------------------------------------------------------

ENGINE = {
    **{"step_s": 0.02, "sequence_s": 0.0005, "prefill_token_s": 0.0001, "stage_s": 1.0, "swap_s": 0.5},
    **{"ranks": 2, "slots": 64, "kv_tokens": 2_000_000},
}
FLEET: dict[str, Any] = {
    "name": "fleet",
    "steps": 10,
    "fleet": {"hosts": 1, "cpus_per_host": 96, "serving_cpus": 8, "measured": ENGINE},
    "workload": {"overrides": {"turns": 0.3}},
    "policy": {"groups": 2, "siblings": 8, "window_groups": 6, "K": 8},
    "trainer": {"step_s": 10.0},
}


def engines(**changed: Any) -> dict[str, Any]:
    return {"fleet": FLEET["fleet"] | {"measured": ENGINE | changed}}


def offered(window_groups: int, **changed: Any) -> dict[str, Any]:
    return {"policy": FLEET["policy"] | {"window_groups": window_groups} | changed}


def pause(fleet: Fleet, now: float) -> None:
    if now in (30.0, 60.0):
        fleet.driver.post(news.PauseAsked(on=now == 30.0))


def drain(fleet: Fleet, now: float) -> None:
    """While the trainer is at a step: that one is waited for."""
    if fleet.core.trainer == "stepping":
        fleet.driver.post(news.DrainAsked())


def block(fleet: Fleet, now: float) -> None:
    """A callback that keeps the whole loop busy."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    if now == 60.0:
        loop._instant.now += 2.0


class Cable:
    """A supervisor's link to host h1, which somebody pulls."""

    name = "h1"

    def __init__(self) -> None:
        self.up = True
        self._changed = asyncio.Event()

    def turn(self, up: bool) -> None:
        self.up = up
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_link(self, *, up: bool) -> str:
        while self.up is not up:
            await self._changed.wait()
        return "plugged in" if up else "the cable was pulled"


def pull(fleet: Fleet, now: float) -> None:
    """For twenty seconds."""
    if now in (40.0, 60.0):
        cable = fleet.driver.world.host_keepers["h1"]._link
        assert isinstance(cable, Cable)
        cable.turn(now == 60.0)


def nothing(fleet: Fleet, now: float) -> None: ...


POOR: list[tuple[str, dict[str, Any], Callable[[Fleet, float], None]]] = [
    ("engine-bound", engines(slots=4), nothing),
    ("kv", engines(kv_tokens=24_000), nothing),
    ("engine-stuck", engines(swap_s=100.0), nothing),
    ("lane", {"fleet": FLEET["fleet"] | {"package_cap": 1, "cpus_per_host": 24}}, nothing),
    ("trainer-bound", {"trainer": {"step_s": 300.0}} | offered(6), nothing),
    ("narrow", {"trainer": {"step_s": 300.0}} | offered(12), nothing),
    (
        "short-bias",
        {"steps": 30, "workload": {"overrides": {"turns": 0.6, "difficulty": 2.0}}} | offered(12, K=1),
        nothing,
    ),
    ("link-down", {"fleet": FLEET["fleet"] | {"hosts": 2}}, pull),
    ("paused", {}, pause),
    ("draining", {}, drain),
    ("loop-lag", {}, block),
]


def told_of_fleet(recipe: dict[str, Any], folder: Path, act: Callable[[Fleet, float], None] = nothing) -> set[str]:
    (folder / "sim.toml").write_bytes(tomli_w.dumps(FLEET | recipe).encode())

    async def main() -> set[str]:
        watcher, lag = Watcher(), LoopLag()

        class Heard(Listener):
            def heard(self, now: float, event: news.Event, commands: Any, core: Core) -> None:
                watcher.recent.heard(now, event, commands, core)

        fleet = build_fleet(load_sim(folder / "sim.toml"), 0, Options(), Heard(), links={"h1": Cable()})
        running = asyncio.ensure_future(fleet.drive())
        late = asyncio.ensure_future(lag.watch(lambda event: None))
        for second in range(1, 4_000):
            await asyncio.wait({running}, timeout=1.0)
            if running.done():
                break
            act(fleet, float(second))
            watcher.look(fleet.core, asyncio.get_running_loop().time(), lag.worst_s)
        for task in (running, late):
            task.cancel()
        await asyncio.gather(running, late, return_exceptions=True)
        return watcher.told

    return virtual(main())


@pytest.mark.parametrize(("name", "recipe", "act"), POOR, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_poor_is_said(
    name: str, recipe: dict[str, Any], act: Callable[[Fleet, float], None], tmp_path: Path
) -> None:
    assert name in told_of_fleet(recipe, tmp_path, act)


def test_every_advice_is_caused_somewhere() -> None:
    assert {name for name, *_ in (*RUDE, *POOR)} == {*ALARMS, *HINTS, "engine-stuck"}
