"""What a run, live or simulated, shows of itself: how long each kind of work took, by the same definitions in both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from agentrl.bench.fleet import WARM, Recorder, simulate
from agentrl.errors import UserError
from agentrl.recipe.sim import SimRecipe
from agentrl.records import AttemptId, Batch, Record, StepReport, Turn
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.wiring.fleet import Options
from agentrl.wiring.recorded import Recorded

KINDS = ("engine", "turn", "opening", "command", "verify", "grading", "trainer")


class Observed(Record):
    """Means, seconds, waits for a lane left out; whatever else had the CPUs is in them.

    engine: prefill and decoding of a turn. turn: from the end of a command to the next call, and what of a call is not
    the engine's. opening, command, verify: in their lanes. grading: of an attempt after its last turn, besides its
    verification. trainer: of a step. mean_s, median_s: from step to step.
    """

    engine: float
    turn: float
    opening: float
    command: float
    verify: float
    grading: float
    trainer: float
    mean_s: float
    median_s: float


@dataclass
class Ended:
    """One finished attempt's times."""

    turns: Sequence[Turn]
    at_s: float
    open_s: float
    verify_wait_s: float
    verify_s: float


class Interval(NamedTuple):
    """Seconds between two steps."""

    mean_s: float
    median_s: float


def interval(run: Recorded) -> Interval:
    intervals = [float(step["interval_s"]) for step in run.steps[WARM:]]
    if len(intervals) < WARM:
        raise UserError(f"{run.folder}: {len(run.steps)} steps are too few", hint="run at least 6 steps")
    return Interval(fmean(intervals), median(intervals))


def live(run: Recorded) -> Observed:
    ended = [
        Ended(each.turns, each.ended_s, each.open_s, each.verdict.queue_s, each.verdict.verify_s)
        for each in run.trajectories
    ]
    return _observed(ended, [float(step["train_s"]) for step in run.steps], interval(run))


def simulated(recipe: SimRecipe, seeds: int) -> Observed:
    """The mean of several seeds."""
    runs = [_simulated(recipe, recipe.seed + 1 + seed) for seed in range(seeds)]
    return Observed(**{name: fmean(getattr(run, name) for run in runs) for name in Observed.__struct_fields__})


def _simulated(recipe: SimRecipe, seed: int) -> Observed:
    watch = _Watch()
    simulate(recipe, seed, Options(), watch, watch=watch.watch)
    assert watch.fleet is not None
    result = watch.result(watch.fleet.core)
    return _observed(watch.finished, watch.steps, Interval(result["mean_s"], result["interval_s"]))


class _Watch(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.finished: list[Ended] = []
        self.steps: list[float] = []
        self._turns: Mapping[AttemptId, list[Turn]] = defaultdict(list)

    def turn(self, attempt: AttemptId, turn: Turn) -> None:
        super().turn(attempt, turn)
        self._turns[attempt].append(turn)

    def stepped(self, batch: Batch, report: StepReport) -> None:
        self.steps.append(report.seconds)

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        if isinstance(event, news.AttemptEnded):
            facts = event.facts
            turns = self._turns[facts.attempt]
            self.finished.append(Ended(turns, now, facts.open_s, facts.verify_wait_s, facts.verify_s))
        super().heard(now, event, commands, core)


def _observed(ended: Sequence[Ended], steps: Sequence[float], between: Interval) -> Observed:
    turns = [turn for each in ended for turn in each.turns]
    return Observed(
        engine=_mean([turn.prefill_s + turn.decode_s for turn in turns]),
        turn=_mean([after for each in ended for after in _after_turns(each)]),
        opening=_mean([each.open_s for each in ended]),
        command=_mean([turn.tool_s for turn in turns if turn.lane is not None]),
        verify=_mean([each.verify_s for each in ended]),
        grading=_mean(
            [max(0.0, each.at_s - _end(each.turns[-1]) - each.verify_wait_s - each.verify_s) for each in ended]
        ),
        trainer=_mean(steps),
        mean_s=between.mean_s,
        median_s=between.median_s,
    )


def _after_turns(ended: Ended) -> list[float]:
    """Of each turn but the last, the time that neither the engine's clock nor the tool's accounts for."""
    spent = []
    for turn, following in zip(ended.turns, ended.turns[1:], strict=False):
        inside = turn.queue_s + turn.prefill_s + turn.decode_s + turn.tool_wait_s + turn.tool_s
        spent.append(max(0.0, following.began_s - turn.began_s - inside))
    return spent


def _end(turn: Turn) -> float:
    return turn.began_s + turn.engine_s + turn.tool_wait_s + turn.tool_s


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
