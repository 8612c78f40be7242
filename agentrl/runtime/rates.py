"""What becomes of finished work, by its length, reward, turns and kind of task: is any of it favoured, does any expire?

Completion: of the trajectories whose group's story is over, those that were trained. Freshness: of those and of the
ones dropped as stale, those that were trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentrl.records import GroupId, TaskId, TrajectoryFacts, Version
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news

DIMENSIONS = ("length", "reward", "turns", "kind")

_LENGTHS = (256, 1_024, 4_096, 16_384, 65_536)
_TURNS = (1, 2, 4, 8, 16, 32, 64, 128)


class Tally(msgspec.Struct):
    """Trajectories. ages: of the trained ones, summed, in versions."""

    trained: int = 0
    stale: int = 0
    dropped: int = 0  # for another reason
    ages: int = 0

    @property
    def completion(self) -> float | None:
        """None before any group's story is over."""
        over = self.trained + self.stale + self.dropped
        return self.trained / over if over else None

    @property
    def freshness(self) -> float | None:
        judged = self.trained + self.stale
        return self.trained / judged if judged else None

    @property
    def age(self) -> float:
        """Mean of the trained ones."""
        return self.ages / self.trained if self.trained else 0.0


class Rates:
    """Single-threaded. `heard` for every event, `ended` for those facts that are not late."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Tally]] = {name: {} for name in DIMENSIONS}
        self._open: dict[GroupId, list[TrajectoryFacts]] = {}
        self._kind_of: dict[TaskId, str] = {}
        self._kinds: dict[GroupId, str] = {}  # of open groups
        self._batch = -1

    def of(self, dimension: str) -> list[tuple[str, Tally]]:
        """(bucket, what became of it), small ones first."""
        found = self._found[dimension]
        return sorted(found.items(), key=lambda pair: _rank(dimension, pair[0]))

    def heard(self, event: news.Event, commands: Sequence[orders.Command]) -> None:
        if isinstance(event, news.TaskOffered):
            self._kind_of[event.task] = event.kind
        for order in commands:
            match order:
                case orders.StartAttempt():
                    self._kinds[order.attempt.group] = self._kind_of.get(order.task, "")
                case orders.TrainOn() if order.batch > self._batch:  # a batch may be given again
                    self._batch = order.batch
                    for proof in order.proofs:
                        self._over(proof.group, "trained", order.version)
                case orders.DropGroup():
                    self._over(order.group, order.reason, Version(0))
                case _:
                    pass

    def ended(self, facts: TrajectoryFacts) -> None:
        self._open.setdefault(facts.attempt.group, []).append(facts)

    def _over(self, group: GroupId, how: str, version: Version) -> None:
        kind = self._kinds.pop(group, "")
        for facts in self._open.pop(group, []):
            for dimension, bucket in _buckets(facts, kind).items():
                tally = self._found[dimension].setdefault(bucket, Tally())
                if how == "trained":
                    tally.trained += 1
                    tally.ages += version - facts.oldest
                elif how == "stale":
                    tally.stale += 1
                else:
                    tally.dropped += 1


def _buckets(facts: TrajectoryFacts, kind: str) -> dict[str, str]:
    return {
        "length": _at_most(facts.tokens, _LENGTHS),
        "reward": "0" if facts.reward <= 0 else "1" if facts.reward >= 1 else "between",
        "turns": _at_most(facts.turns, _TURNS),
        "kind": kind or "unknown",
    }


def _at_most(value: int, edges: Sequence[int]) -> str:
    edge = next((edge for edge in edges if value <= edge), None)
    return f"≤ {edge}" if edge is not None else f"> {edges[-1]}"


def _rank(dimension: str, bucket: str) -> tuple[float, str]:
    if dimension == "reward":
        return ("0", "between", "1").index(bucket), ""
    if dimension == "kind":
        return 0.0, bucket
    sign, _, edge = bucket.partition(" ")
    return int(edge) + (0.5 if sign == ">" else 0.0), ""
