"""Groups, their members, and which try of which member runs.

A member walks waiting -> running -> done. A failed try sends it back to waiting under the next try number, or to lost
when its retries are spent. A group is ready when `siblings` members are done; spare members are then let go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from agentrl.records import AttemptId, GroupId, Place, TaskId, TrajectoryFacts, Version


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    LOST = "lost"
    SPARED = "spared"  # not needed any more: the group is complete without it


@dataclass(slots=True)
class Member:
    index: int
    phase: Phase = Phase.WAITING
    tries: int = 0  # started so far; the running try has number tries - 1
    failures: int = 0
    place: Place | None = None
    host: str = ""
    started: float = 0.0
    first: float | None = None  # start of its first try
    life_s: float = 0.0  # from then to its end
    oldest: Version | None = None  # of the running or the carried-over transcript
    floor: Version | None = None  # the oldest that its engines served when its tries began: no token of theirs is older
    resume: AttemptId | None = None  # earlier try whose durable turns the next one carries on
    fell_back: bool = False  # `finish`: said already that this transcript cannot be of one version
    facts: TrajectoryFacts | None = None


@dataclass(slots=True)
class Group:
    id: GroupId
    task: TaskId
    admitted: float
    members: list[Member]
    window: int = 0  # W when it was admitted
    ready: float | None = None
    done: list[int] = field(default_factory=list)  # member indices in completion order

    @property
    def oldest(self) -> Version | None:
        """Version of the oldest token known so far; None before the first."""
        known = [m.oldest for m in self.members if m.oldest is not None and m.phase is not Phase.SPARED]
        return min(known, default=None)

    @property
    def floor(self) -> Version | None:
        """No token of the group is or will be older, as far as it has begun."""
        known = [m.oldest if m.oldest is not None else m.floor for m in self.members if m.phase is not Phase.SPARED]
        return min((v for v in known if v is not None), default=None)

    def counted(self) -> list[TrajectoryFacts]:
        """The facts of the siblings that count, in member order. Only for a ready group."""
        facts = [self.members[i].facts for i in sorted(self.done)]
        return [f for f in facts if f is not None]

    def attempts(self) -> tuple[AttemptId, ...]:
        """Every try ever started, for whoever keeps payloads by it."""
        return tuple(AttemptId(self.id, m.index, t) for m in self.members for t in range(m.tries))


@dataclass(slots=True)
class Table:
    """All open groups. `running` maps the one current try of each running member; everything else is late news."""

    groups: dict[GroupId, Group] = field(default_factory=dict)
    running: dict[AttemptId, Member] = field(default_factory=dict)
    waiting: dict[GroupId, list[int]] = field(default_factory=dict)  # heaps of member indices, of groups that have any
    _queue: list[GroupId] = field(default_factory=list)  # heap of the groups in `waiting`, pruned lazily
    _resting: list[tuple[float, GroupId, int]] = field(default_factory=list)  # heap: who waits for its next try, until
    _deadlines: list[tuple[float, AttemptId]] = field(default_factory=list)  # heap, pruned lazily
    _next_group: int = 0

    def admit(self, task: TaskId, size: int, now: float, window: int = 0) -> Group:
        group = Group(GroupId(self._next_group), task, now, [Member(i) for i in range(size)], window)
        self._next_group += 1
        self.groups[group.id] = group
        for member in group.members:
            self._wait(group.id, member.index)
        return group

    def _wait(self, group: GroupId, member: int) -> None:
        if group not in self.waiting:
            self.waiting[group] = []
            heapq.heappush(self._queue, group)
        heapq.heappush(self.waiting[group], member)

    def next_waiting(self, key: Callable[[Group], tuple[float, ...]] | None = None) -> tuple[Group, Member] | None:
        """The member that should start next, left in place: of the oldest group, or of the one with the least key."""
        while self.waiting:
            first = self._oldest() if key is None else min(self.waiting, key=lambda g: self._ranked(g, key))
            members, group = self.waiting[first], self.groups.get(first)
            while members and (group is None or group.members[members[0]].phase is not Phase.WAITING):
                heapq.heappop(members)
            if members and group is not None:
                return group, group.members[members[0]]
            del self.waiting[first]
        return None

    def _oldest(self) -> GroupId:
        while self._queue[0] not in self.waiting:
            heapq.heappop(self._queue)
        return self._queue[0]

    def _ranked(self, group: GroupId, key: Callable[[Group], tuple[float, ...]]) -> tuple[float, ...]:
        found = self.groups.get(group)
        return (*key(found), group) if found is not None else (float("-inf"),)  # gone: first, to be pruned

    def start(self, group: Group, member: Member, place: Place, host: str, now: float, deadline: float) -> AttemptId:
        attempt = AttemptId(group.id, member.index, member.tries)
        member.phase, member.tries = Phase.RUNNING, member.tries + 1
        member.place, member.host, member.started = place, host, now
        member.first = now if member.first is None else member.first
        self.running[attempt] = member
        heapq.heappush(self._deadlines, (deadline, attempt))
        return attempt

    def forget(self, attempt: AttemptId) -> Member | None:
        """The attempt is no longer current: whatever it still says is late news."""
        return self.running.pop(attempt, None)

    def wait_again(self, group: Group, member: Member, until: float | None = None) -> None:
        """Back to waiting; not to be started before `until`, so that a fault that lasts does not eat all retries."""
        member.phase, member.place, member.host = Phase.WAITING, None, ""
        if member.resume is None:
            member.oldest, member.floor, member.fell_back = None, None, False
        if until is None:
            self._wait(group.id, member.index)
        else:
            heapq.heappush(self._resting, (until, group.id, member.index))

    def wake(self, now: float) -> None:
        while self._resting and self._resting[0][0] <= now:
            _, group, member = heapq.heappop(self._resting)
            self._wait(group, member)

    def current(self, group: Group) -> Iterator[AttemptId]:
        """The running tries of one group."""
        for member in group.members:
            if member.phase is Phase.RUNNING:
                yield AttemptId(group.id, member.index, member.tries - 1)

    def overdue(self, now: float) -> list[AttemptId]:
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, attempt = heapq.heappop(self._deadlines)
            if attempt in self.running:
                found.append(attempt)
        return found

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self.running:
            heapq.heappop(self._deadlines)
        times = [heap[0][0] for heap in (self._deadlines, self._resting) if heap]
        return min(times, default=None)
