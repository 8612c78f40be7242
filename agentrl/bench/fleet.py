"""What a bench notes of a simulated run: one line a batch, and sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from statistics import mean, median
from typing import Any

from agentrl.ports import Progress
from agentrl.recipe.sim import SimRecipe
from agentrl.records import AttemptId, Batch, GroupId, LoadReport, StepReport, TaskId, TrajectoryFacts, Turn
from agentrl.runtime.loop import Listener
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.commands import Finish
from agentrl.scheduler.core import Core
from agentrl.sim.fleet.ops import Plans
from agentrl.wiring import fleet
from agentrl.wiring.fleet import Fleet, Options

_told: ContextVar[Progress | None] = ContextVar("told", default=None)
_played = count(1)


@contextmanager
def telling(tell: Progress) -> Iterator[None]:
    """Within the block `tell` hears of every run that `simulate` plays."""
    token = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(token)


def simulate(recipe: SimRecipe, seed: int, options: Options, listener: Listener, **more: Any) -> Finish:
    """`wiring.fleet.simulate`, told of."""
    tell = _told.get()
    if tell is not None:
        tell("simulating", f"run {next(_played)}: {recipe.name}, seed {seed}")
    return fleet.simulate(recipe, seed, options, listener, **more)


WARM = 2  # first batches left out: the fleet starts empty


class Recorder(Listener):
    """Listens to one run. A batch's interval is from the cut before to its own cut."""

    def __init__(self) -> None:
        self.cuts: list[dict[str, Any]] = []
        self.swaps: list[LoadReport] = []
        self._facts: dict[AttemptId, TrajectoryFacts] = {}
        self._completed: list[int] = []  # tokens of every completed trajectory, in order
        self._trained: list[int] = []
        self._spent: Counter[int] = Counter()  # sampled tokens by group
        self._opened: dict[GroupId, tuple[TaskId, float]] = {}
        self._returned: dict[GroupId, int] = {}  # tokens of trained groups
        self.wasted = 0
        self.generated = 0
        self.cached = 0
        self.reusable = 0
        self.prompt = 0
        self.turns = 0
        self.fleet: Fleet | None = None
        self.peak_kv = 0.0

    def watch(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def turn(self, attempt: AttemptId, turn: Turn) -> None:
        sampled = turn.end - turn.start
        self.generated += sampled
        self._spent[attempt.group] += sampled
        self.cached += min(turn.cached_tokens, turn.reusable_tokens)
        self.prompt += turn.prompt_tokens
        self.turns += 1

    def stepped(self, batch: Batch, report: StepReport) -> None:
        """The cut says it all: batches hold no payloads here."""

    def swapped(self, engine: str, report: LoadReport, began: float, others_tokens: int) -> None:
        self.swaps.append(report)
        self.generated += report.lost_tokens
        self.wasted += report.lost_tokens

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        if isinstance(event, news.AttemptEnded):
            self._facts[event.facts.attempt] = event.facts
            self._completed.append(event.facts.tokens)
        if isinstance(event, news.EngineLoads):
            used = sum(load.kv_used_tokens for load in event.loads)
            self.peak_kv = max(self.peak_kv, used / max(1, sum(load.kv_total_tokens for load in event.loads)))
        for order in commands:
            match order:
                case orders.StartAttempt():
                    self._opened.setdefault(order.attempt.group, (order.task, now))
                case orders.TrainOn():
                    self._cut(now, order)
                case orders.DropGroup():
                    spent = self._spent.pop(order.group, 0)
                    self.wasted += spent if order.reason != "end" else 0
                case _:
                    pass

    def _cut(self, now: float, order: orders.TrainOn) -> None:
        facts = [self._facts.pop(attempt) for attempt in order.attempts]
        self._trained += [f.tokens for f in facts]
        for fact in facts:
            group = fact.attempt.group
            self._returned[group] = self._returned.get(group, 0) + fact.tokens
        spent = sum(self._spent.pop(proof.group, 0) for proof in order.proofs)
        kept = sum(f.generated for f in facts)
        self.wasted += spent - kept
        self.cuts.append(
            {
                "at_s": now,
                "interval_s": now - (self.cuts[-1]["at_s"] if self.cuts else 0.0),
                "trajectories": len(facts),
                "tokens": sum(f.tokens for f in facts),
                "generated": kept,
                "age_max": max(order.version - proof.oldest for proof in order.proofs),
                "age_mean": mean(order.version - f.oldest for f in facts),
                "ages": dict(Counter(order.version - f.oldest for f in facts)),
            }
        )

    def returned_ratio(self, plans: Plans) -> float:
        """Of groups opened in the first half of the run: mean tokens of those trained over the mean of all, which is
        what `plans` says. Groups that never came back count as opened."""
        middle = self.cuts[len(self.cuts) // 2]["at_s"]
        early = {group: task for group, (task, at_s) in self._opened.items() if at_s < middle}
        back = [self._returned[group] for group in early if group in self._returned]
        assert self.fleet is not None
        siblings = range(self.fleet.policy.siblings)
        every = []
        for task in early.values():
            drawn = [plans.plan(task, member) for member in siblings]
            every.append(sum(plan.opening + plan.stream for plan in drawn))
        return mean(back) / mean(every) if back else 0.0

    def result(self, core: Core, warm: int = WARM) -> dict[str, Any]:
        """Medians over the batches after the first `warm`; sums over the whole run. All of it simulated."""
        cuts = self.cuts[warm:] or self.cuts
        intervals = [cut["interval_s"] for cut in cuts]
        dropped = {reason: n for reason, n in core.ledger.dropped.items() if reason != "end"}
        total_s = self.cuts[-1]["at_s"] if self.cuts else 0.0
        hosts = self.fleet.hosts.values() if self.fleet is not None else []
        return {
            "interval_s": median(intervals),
            "mean_s": mean(intervals),
            "cold_s": self.cuts[0]["interval_s"],
            "intervals_s": intervals,
            "trajectories_per_min": 60 * mean(cut["trajectories"] for cut in cuts) / mean(intervals),
            "tokens_per_min": 60 * sum(cut["tokens"] for cut in cuts) / sum(intervals),
            "length_ratio": mean(self._trained) / mean(self._completed) if self._completed else 0.0,
            "dropped": dropped,
            "wasted_share": self.wasted / max(1, self.generated),
            "age_max": max(cut["age_max"] for cut in cuts),
            "age_mean": mean(cut["age_mean"] for cut in cuts),
            "ages": dict(sum((Counter(cut["ages"]) for cut in cuts), Counter[int]())),
            "reuse": self.cached / max(1, self.prompt),
            "peak_sandboxes": sum(host.peak for host in hosts),
            "peak_kv": self.peak_kv,
            "output_tokens_per_s": self.generated / max(total_s, 1e-9),
            "sampled_per_batch": mean(cut["generated"] for cut in cuts),
            "turns": self.turns,
            "virtual_s": total_s,
            "pause_s_mean": mean([r.pause_s for r in self.swaps]) if self.swaps else 0.0,
        }


def play(recipe: SimRecipe, seed: int, options: Options) -> dict[str, Any]:
    """One run's result."""
    recorder = Recorder()
    finish = simulate(recipe, seed, options, recorder, watch=recorder.watch)
    assert recorder.fleet is not None
    return {"outcome": finish.outcome, **recorder.result(recorder.fleet.core)}
