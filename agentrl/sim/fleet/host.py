"""A sandbox host in virtual time: lanes that queue, CPU sets that are shared evenly by whatever runs in them.

An operation waits for its lane, then for the world (downloads, sleeps: `wait_s`, no CPU), then works `cpu_s` seconds of
CPU on at most `width` CPUs. Isolated, each lane has its own CPUs and the engines have theirs. Pooled, everything shares
all CPUs, engines included: what then exceeds the machine slows the tools and the engines alike.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from agentrl.errors import SandboxLost
from agentrl.records import Lane, LaneStatus, Record, SandboxHostStatus

UNLIMITED = 1 << 30
_RECENT = 512  # waits that a lane's figures are of
_GONE = object()


class LanePlan(Record):
    cap: int
    cpus: float


class HostPlan(Record):
    """lanes: of an isolated host; none: one pool without caps. serving_cpus: what the engines' own work occupies.
    greed: threads that an operation wider than one CPU starts for each CPU it can use. Tools that ask the machine for
    its number of CPUs start too many wherever they are not confined to a set; beside them all others get less."""

    cpus: float
    serving_cpus: float = 0.0
    greed: float = 1.0
    lanes: dict[Lane, LanePlan] = {}


_SHARES = {Lane.RESET: 1, Lane.COMMAND: 4, Lane.PACKAGE: 4, Lane.VERIFY: 2, Lane.CLEANUP: 1}
"""Of the CPUs left over by serving: the live planner's weights."""


def isolated(cpus: float, serving_cpus: float, *, package_cap: int = 16) -> HostPlan:
    """Disjoint CPU sets by the live planner's shares; caps as live: 16 packages, else twice the CPUs."""
    one = (cpus - serving_cpus) / sum(_SHARES.values())
    lanes = {
        lane: LanePlan(cap=package_cap if lane is Lane.PACKAGE else max(1, int(2 * one * share)), cpus=one * share)
        for lane, share in _SHARES.items()
    }
    return HostPlan(cpus=cpus, serving_cpus=serving_cpus, lanes=lanes)


def pooled(cpus: float, serving_cpus: float, *, greed: float = 1.0) -> HostPlan:
    """One unbounded worker pool over all CPUs, the engines' included."""
    return HostPlan(cpus=cpus, serving_cpus=serving_cpus, greed=greed)


@dataclass(slots=True, eq=False)
class _Job:
    """One operation. over: resolved with (seconds queued, seconds run); None where nobody waits."""

    lane: Lane
    cpu_s: float
    wait_s: float
    width: float
    queued: float
    over: asyncio.Future[tuple[float, float]] | None
    began: float = 0.0
    state: str = "queued"  # queued | waiting | working | over
    timer: asyncio.TimerHandle | None = None


class _Line:
    """Jobs that are served at one speed: CPU seconds per unit of width, in a heap of ends. `greed`: threads per CPU."""

    def __init__(self, greed: float) -> None:
        self.greed = greed
        self.served = 0.0
        self.width = 0.0  # of its jobs, together
        self.ends: list[tuple[float, int, _Job]] = []


class _Cpus:
    """Processor sharing between threads: each gets min(1, cpus / threads) of a CPU. One timer for the next end.

    A job has width * greed threads (one, where it is not parallel) and uses at most width CPUs. `others`: threads that
    are always there and take part.
    """

    def __init__(
        self,
        cpus: float,
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[_Job], None],
        *,
        others: float = 0.0,
        greed: float = 1.0,
    ) -> None:
        self.busy_s = 0.0  # CPU seconds given to jobs
        self._cpus = cpus
        self._others = others
        self._loop = loop
        self._finished = finished
        self._at = loop.time()
        self._narrow = _Line(1.0)
        self._wide = _Line(greed) if greed != 1.0 else self._narrow
        self._lines = (self._narrow, self._wide) if greed != 1.0 else (self._narrow,)
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def share(self) -> float:
        """What one thread gets of a CPU."""
        narrow, wide = self._narrow, self._wide
        threads = self._others + narrow.width
        if wide is not narrow:
            threads += wide.width * wide.greed
        return 1.0 if threads <= self._cpus else self._cpus / threads

    def add(self, job: _Job) -> None:
        self._advance()
        job.state = "working"
        line = self._line(job)
        line.width += job.width
        heapq.heappush(line.ends, (line.served + job.cpu_s / job.width, next(self._order), job))
        self._arm()

    def remove(self, job: _Job) -> None:
        self._advance()
        self._leave(job)
        self._arm()

    def _line(self, job: _Job) -> _Line:
        return self._wide if job.width > 1.0 else self._narrow

    def _leave(self, job: _Job) -> None:
        job.state = "over"
        self._line(job).width -= job.width

    def _advance(self) -> None:
        now = self._loop.time()
        passed, share = now - self._at, self.share
        for line in self._lines if passed > 0 else ():
            gained = passed * min(1.0, share * line.greed)
            line.served += gained
            self.busy_s += gained * line.width
        self._at = now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        share, soonest = self.share, math.inf
        for line in self._lines:
            while line.ends and line.ends[0][2].state == "over":
                heapq.heappop(line.ends)
            if line.ends:
                left = max(0.0, line.ends[0][0] - line.served)
                soonest = min(soonest, left / min(1.0, share * line.greed))
        if soonest < math.inf:
            self._timer = self._loop.call_at(self._at + soonest, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._advance()
        for line in self._lines:
            edge = line.served + 1e-9 * max(1.0, line.served)
            while line.ends and (line.ends[0][0] <= edge or line.ends[0][2].state == "over"):
                _, _, job = heapq.heappop(line.ends)
                if job.state == "working":
                    self._leave(job)
                    self._finished(job)
        self._arm()


class Slowed(Protocol):
    """An engine whose CPU work shares this host."""

    slowdown: float


class HostModel:
    """Made inside a running loop. `serve` names the engines that this host's contention slows down."""

    def __init__(self, name: str, plan: HostPlan) -> None:
        self.name = name
        self.plan = plan
        self.live = 0  # sandboxes open; the player counts
        self.peak = 0
        self.lost = ""  # why it is gone
        self._loop = asyncio.get_running_loop()
        self._engines: list[Slowed] = []
        self._jobs: dict[_Job, None] = {}
        self._queues: dict[Lane, deque[_Job]] = {lane: deque() for lane in Lane}
        self._room = {lane: plan.lanes[lane].cap if plan.lanes else UNLIMITED for lane in Lane}
        self._sets = self._make_sets(plan)
        self._waits = {lane: deque[float](maxlen=_RECENT) for lane in Lane}
        self._done = Counter[Lane]()

    def _make_sets(self, plan: HostPlan) -> Mapping[Lane, _Cpus]:
        if not plan.lanes:
            pool = _Cpus(plan.cpus, self._loop, self._finish, others=plan.serving_cpus, greed=plan.greed)
            return dict.fromkeys(Lane, pool)
        return {lane: _Cpus(lane_plan.cpus, self._loop, self._finish) for lane, lane_plan in plan.lanes.items()}

    def serve(self, engine: Slowed) -> None:
        self._engines.append(engine)

    async def run(self, lane: Lane, cpu_s: float, wait_s: float = 0.0, *, width: float = 1.0) -> tuple[float, float]:
        """(seconds queued, seconds run). Cancelling stops it and frees its place. Raises SandboxLost once killed."""
        over: asyncio.Future[tuple[float, float]] = self._loop.create_future()
        job = self._submit(lane, cpu_s, wait_s, width, over)
        try:
            return await over
        except asyncio.CancelledError:
            self._cancel(job)
            raise

    def post(self, lane: Lane, cpu_s: float, wait_s: float = 0.0, *, width: float = 1.0) -> None:
        """Work that nobody waits for: giving back the sandbox of a cancelled attempt."""
        self._submit(lane, cpu_s, wait_s, width, None)

    def busy_s(self) -> float:
        """CPU seconds given to operations so far."""
        return sum(cpus.busy_s for cpus in dict.fromkeys(self._sets.values()))

    def running(self, lane: Lane) -> int:
        cap = self.plan.lanes[lane].cap if self.plan.lanes else UNLIMITED
        return cap - self._room[lane]

    def waiting(self, lane: Lane) -> int:
        return sum(job.state == "queued" for job in self._queues[lane])

    def status(self) -> SandboxHostStatus:
        """As a daemon would say it. CPUs are counted from 0, those of the engines first; pooled, there are no lanes."""
        lanes, first = [], self.plan.serving_cpus
        for lane, plan in self.plan.lanes.items():
            lanes.append(self._lane(lane, plan, first))
            first += plan.cpus
        return SandboxHostStatus(name=self.name, backend="sim", isolation="", live=self.live, lanes=tuple(lanes))

    def _lane(self, lane: Lane, plan: LanePlan, first: float) -> LaneStatus:
        waits = sorted(self._waits[lane])
        return LaneStatus(
            lane=lane,
            cap=plan.cap,
            running=self.running(lane),
            queued=self.waiting(lane),
            cpus=tuple(range(int(first), int(first + plan.cpus))),
            wait_s_mean=sum(waits) / len(waits) if waits else 0.0,
            wait_s_p95=waits[int(0.95 * (len(waits) - 1))] if waits else 0.0,
            done=self._done[lane],
        )

    def kill(self, reason: str = "killed") -> None:
        """Gone with all its sandboxes: every operation raises SandboxLost, now and later."""
        self.lost = reason
        for job in list(self._jobs):
            self._stop(job)
            if job.over is not None and not job.over.done():
                job.over.set_exception(SandboxLost(f"{self.name}: {reason}"))
        self._jobs.clear()
        self._press()

    def _submit(
        self, lane: Lane, cpu_s: float, wait_s: float, width: float, over: asyncio.Future[tuple[float, float]] | None
    ) -> _Job:
        if self.lost:
            raise SandboxLost(f"{self.name}: {self.lost}")
        job = _Job(lane, max(cpu_s, 1e-6), wait_s, width, self._loop.time(), over)
        self._jobs[job] = None
        if self._room[lane] > 0:
            self._begin(job)
        else:
            self._queues[lane].append(job)
        return job

    def _begin(self, job: _Job) -> None:
        self._room[job.lane] -= 1
        job.began = self._loop.time()
        if job.wait_s > 0:
            job.state = "waiting"
            job.timer = self._loop.call_later(job.wait_s, self._work, job)
        else:
            self._work(job)

    def _work(self, job: _Job) -> None:
        self._sets[job.lane].add(job)
        self._press()

    def _finish(self, job: _Job) -> None:
        del self._jobs[job]
        self._waits[job.lane].append(job.began - job.queued)
        self._done[job.lane] += 1
        if job.over is not None and not job.over.done():
            job.over.set_result((job.began - job.queued, self._loop.time() - job.began))
        self._free(job.lane)

    def _cancel(self, job: _Job) -> None:
        if self._jobs.pop(job, _GONE) is _GONE:
            return
        placed = job.state != "queued"
        self._stop(job)
        if placed:
            self._free(job.lane)

    def _stop(self, job: _Job) -> None:
        if job.state == "working":
            self._sets[job.lane].remove(job)
        elif job.timer is not None:
            job.timer.cancel()
        job.state = "over"

    def _free(self, lane: Lane) -> None:
        self._room[lane] += 1
        queue = self._queues[lane]
        while queue and self._room[lane] > 0:
            job = queue.popleft()
            if job.state == "queued":
                self._begin(job)
        self._press()

    def _press(self) -> None:
        """Pooled, the engines' threads get their share of the CPUs like any other."""
        if self.plan.lanes or not self._engines:
            return
        slowdown = 1.0 / self._sets[Lane.COMMAND].share
        for engine in self._engines:
            engine.slowdown = slowdown
