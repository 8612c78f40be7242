"""A sandbox host in virtual time: lanes that queue, CPU sets that are shared evenly by whatever runs in them.

An operation waits for its lane, then for the world (downloads, sleeps: `wait_s`, no CPU), then works `cpu_s` seconds of
CPU on at most `width` CPUs. Isolated, each lane has its own CPUs and the engines have theirs. Pooled, everything shares
all CPUs, engines included: what then exceeds the machine slows the tools and the engines alike. Where a whole run is on
one machine, its trainer and its controller work there as well (`compute`), and engines only while they step (`occupy`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from typing import Protocol

from agentrl.errors import SandboxLost
from agentrl.records import Lane, LaneStatus, Record, SandboxHostStatus
from agentrl.sim.fleet.cpus import Cpus, Job

UNLIMITED = 1 << 30
_RECENT = 512  # waits that a lane's figures are of
_GONE = object()


class LanePlan(Record):
    cap: int
    cpus: float


class HostPlan(Record):
    """lanes: of an isolated host; none: one pool without caps. serving_cpus: what the engines' own work occupies.
    greed: threads that an operation wider than one CPU starts for each CPU it can use. Tools that ask the machine for
    its number of CPUs start too many wherever they are not confined to a set; beside them all others get less.
    caps: of lanes that queue although all share the CPUs."""

    cpus: float
    serving_cpus: float = 0.0
    greed: float = 1.0
    lanes: dict[Lane, LanePlan] = {}
    caps: dict[Lane, int] = {}

    def cap(self, lane: Lane) -> int:
        return self.lanes[lane].cap if self.lanes else self.caps.get(lane, UNLIMITED)


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


def pooled(cpus: float, serving_cpus: float, *, greed: float = 1.0, caps: Mapping[Lane, int] | None = None) -> HostPlan:
    """One pool of workers over all CPUs, the engines' included; without bounds, or lanes that queue."""
    return HostPlan(cpus=cpus, serving_cpus=serving_cpus, greed=greed, caps=dict(caps or {}))


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
        self._jobs: dict[Job, None] = {}
        self._queues: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._room = {lane: plan.cap(lane) for lane in Lane}
        self._sets = self._make_sets(plan)
        self._waits = {lane: deque[float](maxlen=_RECENT) for lane in Lane}
        self._done = Counter[Lane]()

    def _make_sets(self, plan: HostPlan) -> Mapping[Lane, Cpus]:
        if not plan.lanes:
            pool = Cpus(plan.cpus, self._loop, self._finish, others=plan.serving_cpus, greed=plan.greed)
            return dict.fromkeys(Lane, pool)
        return {lane: Cpus(lane_plan.cpus, self._loop, self._finish) for lane, lane_plan in plan.lanes.items()}

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

    async def compute(self, cpu_s: float, *, width: float = 1.0) -> None:
        """Work of something that is no sandbox. Pooled only. Cancelling stops it; SandboxLost once killed."""
        if self.lost:
            raise SandboxLost(f"{self.name}: {self.lost}")
        over: asyncio.Future[tuple[float, float]] = self._loop.create_future()
        job = Job(None, max(cpu_s, 1e-6), 0.0, width, self._loop.time(), over, began=self._loop.time())
        self._jobs[job] = None
        self._pool.add(job)
        self._press()
        try:
            await over
        except asyncio.CancelledError:
            self._cancel(job)
            raise

    def occupy(self, threads: float) -> None:
        """Threads of an engine come, or go where negative. Pooled only."""
        self._pool.others += threads
        self._press()

    def post(self, lane: Lane, cpu_s: float, wait_s: float = 0.0, *, width: float = 1.0) -> None:
        """Work that nobody waits for: giving back the sandbox of a cancelled attempt."""
        self._submit(lane, cpu_s, wait_s, width, None)

    def busy_s(self) -> float:
        """CPU seconds given to operations so far."""
        return sum(cpus.busy_s for cpus in dict.fromkeys(self._sets.values()))

    def running(self, lane: Lane) -> int:
        return self.plan.cap(lane) - self._room[lane]

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
    ) -> Job:
        if self.lost:
            raise SandboxLost(f"{self.name}: {self.lost}")
        job = Job(lane, max(cpu_s, 1e-6), wait_s, width, self._loop.time(), over)
        self._jobs[job] = None
        if self._room[lane] > 0:
            self._begin(job)
        else:
            self._queues[lane].append(job)
        return job

    def _begin(self, job: Job) -> None:
        assert job.lane is not None
        self._room[job.lane] -= 1
        job.began = self._loop.time()
        if job.wait_s > 0:
            job.state = "waiting"
            job.timer = self._loop.call_later(job.wait_s, self._work, job)
        else:
            self._work(job)

    def _work(self, job: Job) -> None:
        self._set(job.lane).add(job)
        self._press()

    @property
    def _pool(self) -> Cpus:
        assert not self.plan.lanes, "an isolated host has no pool"
        return self._sets[Lane.COMMAND]

    def _set(self, lane: Lane | None) -> Cpus:
        return self._pool if lane is None else self._sets[lane]

    def _finish(self, job: Job) -> None:
        del self._jobs[job]
        if job.lane is not None:
            self._waits[job.lane].append(job.began - job.queued)
            self._done[job.lane] += 1
        if job.over is not None and not job.over.done():
            job.over.set_result((job.began - job.queued, self._loop.time() - job.began))
        self._free(job.lane)

    def _cancel(self, job: Job) -> None:
        if self._jobs.pop(job, _GONE) is _GONE:
            return
        placed = job.state != "queued"
        self._stop(job)
        if placed:
            self._free(job.lane)

    def _stop(self, job: Job) -> None:
        if job.state == "working":
            self._set(job.lane).remove(job)
        elif job.timer is not None:
            job.timer.cancel()
        job.state = "over"

    def _free(self, lane: Lane | None) -> None:
        if lane is not None:
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
