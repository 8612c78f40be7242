"""Workloads are pure in their seed; the player's facts add up, survive lost engines, and resume where they were."""

from __future__ import annotations

import asyncio
import hashlib
import os
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from agentrl.errors import DataError, DeadlineError, RecipeError
from agentrl.recipe.load import load_sim
from agentrl.records import AttemptId, GroupId, Place, Stop, Task, TaskId, TrajectoryFacts, Turn, Verdict, Version
from agentrl.runtime.player import Heard
from agentrl.scheduler.commands import StartAttempt
from agentrl.sim.clock import run
from agentrl.sim.fleet import trace
from agentrl.sim.fleet.build import host_plan_of, plans_of, policy_of, serving_of
from agentrl.sim.fleet.engine import EngineModel
from agentrl.sim.fleet.host import HostModel, isolated
from agentrl.sim.fleet.ops import Plans
from agentrl.sim.fleet.player import FleetPlayer
from agentrl.sim.fleet.roofline import Roofline, Serving
from agentrl.sim.fleet.workload import PRESETS, SWE_BENCH, TERMINAL_BENCH, Workload
from agentrl.sim.scripted import MovablePlacement

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "sim").glob("*.toml"))


class Stage:
    """Two engines, one host, and whatever was heard."""

    def __init__(self, plans: Plans) -> None:
        loop = asyncio.get_running_loop()
        self.engines = {name: EngineModel(name, Roofline(Serving())) for name in ("e0", "e1")}
        self.hosts = {"h": HostModel("h", isolated(64, 8))}
        self.player = FleetPlayer(engines=self.engines, hosts=self.hosts, plans=plans, clock=loop.time)
        self.began: list[Version] = []
        self.turns: list[Turn] = []
        self.heard = Heard(began=self.began.append, turn=self._heard_turn, ended=lambda trajectory: None)
        self._awaited: dict[int, asyncio.Event] = {}

    def _heard_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        if event := self._awaited.get(len(self.turns)):
            event.set()

    async def turned(self, count: int) -> None:
        """Returns once `count` turns are over."""
        await self._awaited.setdefault(count, asyncio.Event()).wait()

    def play(self, placement: MovablePlacement, *, attempt: int = 0, member: int = 0) -> asyncio.Task[TrajectoryFacts]:
        me = AttemptId(GroupId(0), member, attempt)
        resume = AttemptId(GroupId(0), member, attempt - 1) if attempt else None
        start = StartAttempt(
            attempt=me, task=TaskId("t0"), place=placement.place, host="h", deadline_s=1e9, resume=resume
        )
        task = Task(id=TaskId("t0"), kind="k", instruction="", root="")
        return asyncio.get_running_loop().create_task(self.player.play(start, task, placement, self.heard))


def test_the_facts_are_those_of_the_plan() -> None:
    workload = Workload(TERMINAL_BENCH, 0)
    plan = workload.plan("t0", 0)

    async def main() -> None:
        stage = Stage(workload)
        facts = await stage.play(MovablePlacement(Place("e0", 3)))
        generated = sum(turn.new_tokens for turn in plan.turns)
        told = msgspec.structs.asdict(facts)
        times = {name: told.pop(name) for name in list(told) if name.endswith("_s")}
        assert sum(times[name] for name in ("engine_s", "tool_s", "open_s", "verify_s")) > 0
        assert times["queue_s"] + times["prefill_s"] < times["engine_s"]
        assert times["tool_wait_s"] < times["tool_s"]
        assert told == {
            "attempt": AttemptId(GroupId(0), 0, 0),
            "reward": plan.reward,
            "tokens": plan.opening + plan.stream,
            "generated": generated,
            "versions": ((0, generated),),
            "turns": len(plan.turns),
            "prompt_tokens": sum(turn.prompt_tokens for turn in stage.turns),
            "cached_tokens": sum(turn.cached_tokens for turn in stage.turns),
            "reusable_tokens": sum(turn.cached_tokens for turn in stage.turns),  # alone: all that can be is reused
            "regenerated": 0,
            "stop": plan.stop,
        }
        assert stage.began == [0]
        assert [turn.index for turn in stage.turns] == list(range(len(plan.turns)))
        assert stage.turns[-1].command is None
        assert stage.hosts["h"].live == 0
        assert stage.hosts["h"].peak == 1

    run(main())


def test_a_lost_engine_costs_the_turn_and_the_cache() -> None:
    async def main() -> None:
        stage = Stage(Workload(TERMINAL_BENCH, 0))
        placement = MovablePlacement(Place("e0", 0))
        playing = stage.play(placement)
        await stage.turned(3)
        await asyncio.sleep(0.1)
        assert stage.engines["e0"].loads()[0].running
        stage.engines.pop("e0").kill()
        await placement.waited_for()
        placement.move(Place("e1", 2))
        facts = await playing
        assert facts.regenerated == 1
        moved = next(turn for turn in stage.turns if turn.place == Place("e1", 2))
        assert (moved.cached_tokens, moved.reusable_tokens, moved.regenerated) == (0, 0, 1)

    run(main())


def test_a_cancelled_attempt_resumes_after_its_finished_turns() -> None:
    workload = Workload(TERMINAL_BENCH, 0)

    async def main() -> None:
        stage = Stage(workload)
        placement = MovablePlacement(Place("e0", 0))
        playing = stage.play(placement)
        await stage.turned(4)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert stage.hosts["h"].live == 0
        facts = await stage.play(placement, attempt=1)
        assert [turn.index for turn in stage.turns] == list(range(len(workload.plan("t0", 0).turns)))
        assert facts.turns == len(stage.turns)
        assert stage.began == [0, 0]

    run(main())


def test_new_weights_void_the_cached_history() -> None:
    async def main() -> None:
        stage = Stage(Workload(TERMINAL_BENCH, 0))
        playing = stage.play(MovablePlacement(Place("e0", 0)))
        await stage.turned(4)
        await stage.engines["e0"].swap(Version(1))
        facts = await playing
        assert [version for version, _ in facts.versions] == [0, 1]
        assert min(turn.cached_tokens for turn in stage.turns[4:6]) == 0

    run(main())


@pytest.mark.parametrize("name", PRESETS)
def test_lengths_keep_the_limits(name: str) -> None:
    shape = PRESETS[name]
    plans = [Workload(shape, 1).plan(f"t{g}", m) for g in range(40) for m in range(4)]
    for plan in plans:
        assert plan.opening + plan.stream <= shape.context_tokens
        assert plan.stream <= shape.stream_tokens
        assert 1 <= len(plan.turns) <= shape.max_turns
        assert all(turn.op is not None for turn in plan.turns[:-1])
        assert plan.turns[-1].op is None
    assert {plan.stop for plan in plans} <= {Stop.SUBMITTED, Stop.CONTEXT_FULL, Stop.TURN_LIMIT}


def test_the_terminal_stream_has_the_published_mean() -> None:
    streams = [Workload(TERMINAL_BENCH, 2).plan(f"t{g}", 0).stream for g in range(1_500)]
    assert statistics.fmean(streams) == pytest.approx(10_600, rel=0.1)


def test_siblings_resemble_one_another() -> None:
    workload = Workload(SWE_BENCH, 3)
    turns = [[len(workload.plan(f"t{g}", m).turns) for m in range(8)] for g in range(60)]
    within = statistics.fmean(statistics.variance(group) for group in turns)
    between = statistics.variance([statistics.fmean(group) for group in turns])
    assert between > 2 * within / 8  # eight strangers' means would vary by within / 8


def outputs(code: str) -> set[str]:
    """What fresh processes with different hash seeds print."""
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
            cwd=RECIPES[0].parents[2],
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }


def test_a_plan_depends_on_nothing_but_its_seed() -> None:
    workload = Workload(SWE_BENCH, 7)
    workload.plan("another", 0)
    code = "from agentrl.sim.fleet.workload import *; print(Workload(SWE_BENCH, 7).plan('task', 3))"
    assert outputs(code) == {f"{workload.plan('task', 3)}\n"}


def history() -> str:
    """Every turn of a small fleet, with its times, and when it ended."""

    async def main() -> str:
        stage = Stage(Workload(TERMINAL_BENCH, 0))
        places = [MovablePlacement(Place(f"e{m % 2}", m % 8)) for m in range(24)]
        await asyncio.gather(*(stage.play(place, member=m) for m, place in enumerate(places)))
        return hashlib.sha256(repr((stage.turns, asyncio.get_running_loop().time())).encode()).hexdigest()

    return run(main())


def test_a_fleet_has_one_history() -> None:
    assert outputs("from tests.sim.test_fleet_player import history; print(history())") == {f"{history()}\n"}


def test_a_trace_replays_what_was_recorded(tmp_path: Path) -> None:
    workload, file = Workload(TERMINAL_BENCH, 0), tmp_path / "trace.jsonl"
    trace.write(file, trace.sampled(workload, ["t0", "t1"], 3))
    recorded = trace.Trace.load(file)
    assert recorded.groups == ("t0", "t1")
    assert recorded.plan("t1", 2) == workload.plan("t1", 2)
    with pytest.raises(DataError, match="no member 3 of group t1"):
        recorded.plan("t1", 3)
    file.write_bytes(file.read_bytes() + b'{"group": 3}\n')
    with pytest.raises(DataError, match=r"trace\.jsonl:7"):
        trace.Trace.load(file)


def test_a_live_attempt_becomes_a_plan() -> None:
    async def main() -> None:
        stage = Stage(Workload(TERMINAL_BENCH, 0))
        facts = await stage.play(MovablePlacement(Place("e0", 0)))
        plan = trace.plan_of(stage.turns, Verdict(reward=1.0, verify_s=3.0), Stop.SUBMITTED, cpu_share=0.5)
        assert plan.opening + plan.stream == facts.tokens
        spent = sum(turn.op.cpu_s + turn.op.wait_s for turn in plan.turns if turn.op is not None)
        assert spent == pytest.approx(sum(turn.tool_s for turn in stage.turns))
        assert (plan.verify.cpu_s, plan.verify.wait_s, plan.reward) == (1.5, 1.5, 1.0)

    run(main())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_are_valid(path: Path) -> None:
    recipe = load_sim(path)
    assert recipe.policy.groups * recipe.policy.siblings == 256
    serving_of(recipe), policy_of(recipe), host_plan_of(recipe)
    assert plans_of(recipe, 0).plan("t", 0) == plans_of(recipe, 0).plan("t", 0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fleet.topolgy=tp8", "unknown key"),
        ("fleet.topology=tp4", "expected one of: tp8, dp8ep8"),
        ("policy.window_groups=3", "3 open groups can never fill a batch of 8"),
        ("fleet.serving_cpus=128", "leaves no CPU for sandboxes"),
        ("workload.overrides.turns=0", "expected float > 0"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_sim(RECIPES[1], overrides=[override])


def test_a_lost_engine_without_a_successor_is_an_error() -> None:
    async def main() -> None:
        stage = Stage(Workload(TERMINAL_BENCH, 0))
        stage.engines["e0"].kill()
        with pytest.raises(DeadlineError, match="no place away"):
            await stage.play(MovablePlacement(Place("e0", 0)))
        assert stage.hosts["h"].live == 0

    run(main())
