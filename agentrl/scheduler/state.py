"""All that the scheduler knows, in one place. The rules that change it are in attempts, fleet and core."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from agentrl.records import TaskId, Version
from agentrl.scheduler import commands as order
from agentrl.scheduler.bank import Bank
from agentrl.scheduler.groups import Table
from agentrl.scheduler.policy import Policy
from agentrl.scheduler.routing import Engine, Router
from agentrl.scheduler.sizing import Room, Window


@dataclass(slots=True)
class Ledger:
    """Every group admitted ends exactly once. Counts only; the open ones are in the table and in the running batch."""

    admitted: int = 0
    completed: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    started: int = 0
    ended: int = 0
    retried: int = 0
    restarted: int = 0  # retried from the beginning, nothing carried over
    mixed: int = 0  # ended attempts whose tokens are of more than one version
    fallbacks: int = 0  # `finish`: conversations that could not finish under their first version, once each
    unsaid: int = 0  # `finish`: of the mixed, those that were not counted as a fallback before they ended: a bug
    late: int = 0  # news of attempts that are not current


class State:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version = Version(0)  # what the trainer holds
        self.round_version = Version(0)  # what a round's groups are sampled with; see `serving`
        self.round_admitted = 0
        self.round_trained = 0
        self.steps = 0
        self.target = policy.steps
        self.window = Window(policy)
        self.table = Table()
        self.bank = Bank()
        self.router = Router()
        self.buried: dict[str, int] = {}  # engine -> epoch of its newest incarnation that is gone
        self.hosts: dict[str, int] = {}  # sandbox host -> capacity
        self.host_load: Counter[str] = Counter()
        self.ledger = Ledger()
        self.trainer = "absent"  # absent | ready (it waits for a batch) | stepping
        self.ready_ahead = False  # it asked for the next batch before the news that it finished this one
        self.training: order.TrainOn | None = None
        self.held: deque[tuple[Version, int]] = deque()  # places of trained groups whose weights are not live yet
        self.offered: deque[TaskId] = deque()
        self.asked = 0  # tasks asked for and not offered yet
        self.quarantine: set[TaskId] = set()
        self.batches = 0
        self.paused = False
        self.draining = False
        self.finished: order.Finish | None = None
        self.broken = 0  # attempts that failed in a row
        self.last_fault = ""
        self.mean_group_s = 0.0  # running mean of a group's time from admission to completion
        self.moved_at = 0.0  # when anything last moved
        self.out: list[order.Command] = []

    @property
    def engines(self) -> list[Engine]:
        return list(self.router.engines.values())

    @property
    def serving(self) -> Version:
        """What every engine should hold: the newest version, or the one that the round was begun with."""
        return self.version if self.policy.mode == "async" else self.round_version

    @property
    def room(self) -> Room:
        ranks = [rank for engine in self.engines for rank in engine.ranks]
        return Room(
            slots=sum(rank.slots for rank in ranks),
            kv_tokens=sum(rank.kv_tokens for rank in ranks),
            sandboxes=sum(self.hosts.values()),
        )

    @property
    def places_used(self) -> int:
        """Of the window: open groups, those in training, and trained ones whose weights are not live everywhere."""
        return len(self.table.groups) + self.places_held

    @property
    def places_held(self) -> int:
        training = len(self.training.proofs) if self.training is not None else 0
        return training + sum(count for _, count in self.held)
