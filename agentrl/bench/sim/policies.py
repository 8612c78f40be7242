"""Policies of peer systems as small changes to the core, described from their public behaviour, in the same world.

What is compared is when work is admitted, in which order it starts, and what becomes of leftovers; routing, lanes and
publication are the same for all, so that each peer is given our engines at their best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from agentrl.scheduler import attempts
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy


class Admitting(Core):
    """Whether another group may open is the subclass's rule, in place of window and freshness fence. depth: groups."""

    def __init__(self, policy: Policy, depth: int) -> None:
        super().__init__(policy)
        self.depth = depth

    @property
    def incomplete(self) -> int:
        return len(self.table.groups) - len(self.bank)


class FixedPool(Admitting):
    """A fixed number of groups in flight, topped up as they complete; finished ones wait in a queue without end, and
    the trainer takes what finished first, however old (slime's fully asynchronous worker)."""

    def may_admit(self) -> bool:
        return self.incomplete < self.depth


class Lead(Admitting):
    """Admission by lead over the trainer: (eta + version + 1) * B - (accepted + running) groups may open; any that
    finished are taken and nothing expires (AReaL). eta is the depth in batches, less one."""

    def may_admit(self) -> bool:
        lead = self.depth + self.version * self.policy.groups
        return lead > self.ledger.completed + self.incomplete


class Dispatcher(Admitting):
    """One permit for each conversation under a cap that grows by a tenth every 5 s while no engine queues and is cut
    when one does; no new group while a whole batch waits; whole groups dropped beyond a lag of K (prime-rl)."""

    grow, shrink, every_s = 1.1, 0.7, 5.0

    def __init__(self, policy: Policy, depth: int) -> None:
        super().__init__(policy, depth)
        self.least = float(policy.groups * policy.siblings)
        self.cap = self.least
        self.changed_at = 0.0

    def may_admit(self) -> bool:
        return len(self.table.running) < self.cap and len(self.bank) < self.policy.groups

    def _absorb(self, event: news.Event, now: float) -> None:
        super()._absorb(event, now)
        if isinstance(event, news.EngineLoads) and now - self.changed_at >= self.every_s:
            self.changed_at = now
            queued = any(rank.load and rank.load.waiting for engine in self.engines for rank in engine.ranks)
            most = float(self.depth * self.policy.siblings)
            if queued:
                self.cap = max(self.least, self.shrink * self.cap)
            elif len(self.table.running) >= self.cap - self.policy.siblings:
                self.cap = min(most, self.grow * self.cap)


class AbortAndResume(Core):
    """Rounds with surplus: as soon as a batch is complete everything else is aborted, and what it has done so far is
    carried into the next round, after the new weights are live everywhere (APRIL)."""

    def __init__(self, policy: Policy, depth: int) -> None:
        super().__init__(policy)

    def _fill(self, now: float) -> None:
        before = self.batches
        super()._fill(now)
        if self.batches > before:
            for attempt in list(self.table.running):
                attempts.interrupt(self, attempt, "the batch is complete")

    def _start(self, now: float) -> None:
        if self.training is None and not self.held:
            super()._start(now)


class Eager(Core):
    """All groups of the window open at once, so that the order in which their siblings start is a choice: longest
    conversations first (Heddle), or the group with least work left, none waiting for ever (WAR)."""

    def __init__(self, policy: Policy, depth: int) -> None:
        super().__init__(policy)

    def _start(self, now: float) -> None:
        if not (self.paused or self.draining or self.steps >= self.target):
            while self.may_admit() and self._admit(now):
                pass
        super()._start(now)


class Peer(NamedTuple):
    """make: from policy and depth in groups. windowed: our window admits, else a rule of its own. bound: K holds."""

    name: str
    make: Callable[[Policy, int], Core]
    admission: str = "fifo"
    mode: str = "async"
    windowed: bool = True
    bound: bool = True
    ours: bool = False


def _core(policy: Policy, depth: int) -> Core:
    return Core(policy)


PEERS = (
    Peer("ours: window, K at the cut, soonest to expire first", _core, admission="expiry", ours=True),
    Peer("rounds: sample, train, publish", _core, mode="sync"),
    Peer("fixed pool of groups (slime-like)", FixedPool, windowed=False, bound=False),
    Peer("admission by lead (AReaL-like)", Lead, windowed=False, bound=False),
    Peer("dispatcher, adaptive cap, lag bound (prime-rl-like)", Dispatcher, windowed=False),
    Peer("abort and resume with surplus (APRIL-like)", AbortAndResume),
    Peer("longest first (Heddle-like)", Eager, admission="longest-first"),
    Peer("shortest group first, waiting guard (WAR-like)", Eager, admission="shortest-group"),
)
