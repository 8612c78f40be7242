"""CPUs in virtual time, shared evenly by the threads that work on them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.records import Lane


@dataclass(slots=True, eq=False)
class Job:
    """One operation; lane None: work of something that is no sandbox.

    over: resolved with (seconds queued, seconds run); None where nobody waits.
    """

    lane: Lane | None
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
        self.ends: list[tuple[float, int, Job]] = []


class Cpus:
    """Processor sharing between threads: each gets min(1, cpus / threads) of a CPU. One timer for the next end.

    A job has width * greed threads (one, where it is not parallel) and uses at most width CPUs. `others`: threads that
    take part and are not jobs: engines.
    """

    def __init__(
        self,
        cpus: float,
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[Job], None],
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

    @property
    def others(self) -> float:
        return self._others

    @others.setter
    def others(self, threads: float) -> None:
        self._advance()
        self._others = threads
        self._arm()

    def add(self, job: Job) -> None:
        self._advance()
        job.state = "working"
        line = self._line(job)
        line.width += job.width
        heapq.heappush(line.ends, (line.served + job.cpu_s / job.width, next(self._order), job))
        self._arm()

    def remove(self, job: Job) -> None:
        self._advance()
        self._leave(job)
        self._arm()

    def _line(self, job: Job) -> _Line:
        return self._wide if job.width > 1.0 else self._narrow

    def _leave(self, job: Job) -> None:
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
