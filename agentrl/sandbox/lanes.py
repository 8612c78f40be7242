"""The five lanes: each with its own cap, FIFO queue and CPU set, so that no kind of work can starve another.

A lane's token is handed straight to the longest waiter, so nobody overtakes; a cancelled waiter leaves the queue, and a
holder that fails gives its token back on the way out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentrl.errors import DeadlineError
from agentrl.recipe.schema import LaneCaps
from agentrl.records import Lane, LaneStatus
from agentrl.sandbox.cpusets import CpuPlan

_RECENT = 512
_WIDTH_VARIABLES = (
    "CARGO_BUILD_JOBS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "OMP_NUM_THREADS",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
)


class Gate:
    """At most `cap` holders, first come first served. Invariant: someone waits only while all tokens are out."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def try_acquire(self) -> bool:
        """Takes a free token, never from under a waiter."""
        if self.running >= self.cap:
            return False
        self.running += 1
        return True

    async def acquire(self, timeout_s: float) -> None:
        """TimeoutError after `timeout_s`. Cancelling or timing out leaves the queue."""
        if self.try_acquire():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the token came in the same moment: pass it on
                self.release()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


@dataclass
class Ticket:
    """A place in a lane, held until the `enter` block ends. `lane` and `cpus` change when it is moved."""

    lane: Lane
    cpus: tuple[int, ...]
    queue_s: float


@dataclass
class _Lane:
    gate: Gate
    cpus: tuple[int, ...]
    done: int = 0
    waited_s: float = 0.0
    entered: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Lanes:
    """One host's lanes. Belongs to one event loop."""

    def __init__(self, plan: CpuPlan, caps: LaneCaps) -> None:
        self.plan = plan
        self._lanes = {
            lane: _Lane(Gate(getattr(caps, lane.value) or 2 * len(plan.lanes[lane])), plan.lanes[lane]) for lane in Lane
        }

    @asynccontextmanager
    async def enter(self, lane: Lane, *, timeout_s: float) -> AsyncIterator[Ticket]:
        """Wait for a token of `lane`, hold it for the block. DeadlineError after `timeout_s` in the queue."""
        state = self._lanes[lane]
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await state.gate.acquire(timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"the {lane} lane gave no place within {timeout_s:g} s: {state.gate.running} running (cap "
                f"{state.gate.cap}), {state.gate.queued} queued",
                hint=f"Raise sandbox.lanes.{lane}, give the lane more CPUs, or open fewer sandboxes at once.",
            ) from None
        ticket = Ticket(lane, state.cpus, clock() - began)
        state.entered += 1
        state.waited_s += ticket.queue_s
        state.recent.append(ticket.queue_s)
        try:
            yield ticket
        finally:
            self._lanes[ticket.lane].done += 1
            self._lanes[ticket.lane].gate.release()

    def try_move(self, ticket: Ticket, lane: Lane) -> bool:
        """Give `ticket` a free place in `lane` and free its old one. False where none is free: it stays.

        The caller moves the running processes to `ticket.cpus`.
        """
        if ticket.lane == lane or not self._lanes[lane].gate.try_acquire():
            return False
        self._lanes[ticket.lane].gate.release()
        ticket.lane, ticket.cpus = lane, self._lanes[lane].cpus
        return True

    def widths(self, lane: Lane) -> dict[str, str]:
        """What tells build tools and test runners how wide the lane is: they would see the whole machine otherwise."""
        width = len(self._lanes[lane].cpus)
        return {"MAKEFLAGS": f"-j{width}"} | dict.fromkeys(_WIDTH_VARIABLES, str(width))

    def status(self) -> tuple[LaneStatus, ...]:
        return tuple(self._status(lane, state) for lane, state in self._lanes.items())

    def _status(self, lane: Lane, state: _Lane) -> LaneStatus:
        recent = sorted(state.recent)
        return LaneStatus(
            lane=lane,
            cap=state.gate.cap,
            running=state.gate.running,
            queued=state.gate.queued,
            cpus=state.cpus,
            merged_with=self.plan.merged_with(lane),
            wait_s_mean=state.waited_s / state.entered if state.entered else 0.0,
            wait_s_p95=recent[int(0.95 * (len(recent) - 1))] if recent else 0.0,
            done=state.done,
        )


def environment(*layers: Mapping[str, str] | None) -> dict[str, str]:
    """Later layers win."""
    return {name: value for layer in layers if layer for name, value in layer.items()}
