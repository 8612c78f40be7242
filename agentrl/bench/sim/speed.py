"""How fast the simulator is, and what an event costs as trajectories in flight or hosts grow in number. Measured, on
this machine."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from agentrl.bench.fleet import Recorder, simulate
from agentrl.bench.sim.sheet import Sheet, Table
from agentrl.recipe.sim import SimRecipe
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.wiring.fleet import Options

SIZES = (1_000, 10_000, 100_000)
HOSTS = (4, 16, 64)  # of 8 ranks each
CROWD = 10_000  # in flight on them
SHORT = 0.2  # of the preset's turns: what grows is the number of trajectories, not the patience of the reader
_FREE = 1e9


class Timed(Core):
    """A core that notes the CPU seconds it thinks."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.events = 0
        self.thought_s = 0.0

    def handle(self, event: news.Event, now: float) -> list[orders.Command]:
        began = time.process_time()
        commands = super().handle(event, now)
        self.thought_s += time.process_time() - began
        self.events += 1
        return commands


def recipe_of(recipe: SimRecipe, in_flight: int, hosts: int) -> SimRecipe:
    """`hosts` of the recipe's with `in_flight` short trajectories on them, two batches of an eighth of them each."""
    replace, policy = msgspec.structs.replace, recipe.policy
    window = max(8, in_flight // policy.siblings)
    return replace(
        recipe,
        steps=2,
        policy=replace(
            policy,
            groups=window // 8,
            window_groups=window,
            window_attempts=in_flight,
            attempt_timeout_s=_FREE,
            stall_s=_FREE,
        ),
        fleet=replace(recipe.fleet, hosts=hosts, sandboxes_per_host=in_flight),
        workload=replace(recipe.workload, overrides=replace(recipe.workload.overrides, turns=SHORT)),
    )


def measure(recipe: SimRecipe, in_flight: int, hosts: int, seed: int) -> dict[str, Any]:
    recorder, cores = Recorder(), list[Timed]()

    def make(policy: Policy) -> Core:
        cores.append(Timed(policy))
        return cores[-1]

    wall, cpu = time.perf_counter(), time.process_time()
    simulate(recipe_of(recipe, in_flight, hosts), seed, Options(), recorder, watch=recorder.watch, make_core=make)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    [core] = cores
    virtual = recorder.cuts[-1]["at_s"]
    return {
        "in_flight": in_flight,
        "hosts": hosts,
        "virtual_s": virtual,
        "wall_s": wall,
        "cpu_s": cpu,
        "virtual_over_wall": virtual / wall,
        "turns": recorder.turns,
        "events": core.events,
        "events_per_s": core.events / wall,
        "us_per_event": 1e6 * core.thought_s / core.events,
        "us_per_turn": 1e6 * cpu / recorder.turns,
    }


def run(
    recipe: SimRecipe, seeds: int, sizes: tuple[int, ...] = SIZES, hosts: tuple[int, ...] = HOSTS, crowd: int = CROWD
) -> Sheet:
    """seeds: each point is measured so often and the fastest counts, for the machine may be busy."""

    def best(in_flight: int, count: int) -> dict[str, Any]:
        return min((measure(recipe, in_flight, count, recipe.seed) for _ in range(seeds)), key=lambda p: p["cpu_s"])

    points = [best(n, recipe.fleet.hosts) for n in sizes]
    wider = [best(crowd, n) for n in hosts]
    return Sheet(
        arm="speed",
        recipe=recipe.name,
        seeds=seeds,
        mode="measured",
        tables=(
            _table("as trajectories grow in number (measured)", points),
            _table("as hosts grow in number (measured)", wider),
        ),
        notes=(
            f"conversations of {SHORT:.0%} of the preset's turns; core µs: CPU time inside the scheduler for one event",
        ),
        data={"points": points, "hosts": wider},
    )


def _table(title: str, points: list[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            f"{p['in_flight']:,}",
            f"{p['hosts']}",
            f"{p['virtual_over_wall']:.0f}",
            f"{p['events']:,}",
            f"{p['events_per_s']:,.0f}",
            f"{p['us_per_event']:.0f}",
            f"{p['turns']:,}",
            f"{p['us_per_turn']:.0f}",
            f"{p['cpu_s']:.1f}",
        )
        for p in points
    )
    columns = (
        *("in flight", ">hosts", ">virtual / wall", ">events", ">events/s", ">core µs an event", ">turns"),
        *(">CPU µs a turn", ">CPU s"),
    )
    return Table(title=title, columns=columns, rows=rows)
