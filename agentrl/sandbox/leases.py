"""Leased sandboxes on one host: opened, used, expired, closed. No HTTP here; `daemon` is the face.

A lease ends by `close`, by time (an unused lease only: work in progress holds it), by the loss of its box, or with the
daemon. However it ends, its work is cancelled first (cancel means kill), then the box is killed in the cleanup lane,
and only then is its place among the `max_live` given on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from agentrl.errors import SandboxLost, TaskError, UnavailableError
from agentrl.records import ExecResult, File, Lane, SandboxHostStatus, Task
from agentrl.sandbox import wire
from agentrl.sandbox.backends.base import Backend, Box, BoxSpec
from agentrl.sandbox.detector import classify
from agentrl.sandbox.lanes import Gate, Lanes, Ticket, environment
from agentrl.sandbox.once import Once

_ANSWERS_PER_BOX = 16
_ANSWERS_OF_OPEN = 1_024
_GRACE_S = 30.0  # above the backends' own: one still silent so long after a command's time-out is taken for lost
_OUTPUT_SHOWN = 1_000

_log = logging.getLogger(__name__)


@dataclass
class Lease:
    """One sandbox in somebody's hands. timer runs exactly while nothing is busy in it."""

    id: str
    box: Box
    task: Task
    label: str
    lease_s: float
    once: Once
    busy: int = 0
    executing: int = 0
    timer: asyncio.TimerHandle | None = None
    closing: asyncio.Task[None] | None = None
    queue_s: float = 0.0  # for the reset lane


class Leases:
    """All sandboxes of one daemon. `tasks` is the daemon's group: nothing started here outlives it."""

    def __init__(
        self,
        backend: Backend,
        lanes: Lanes,
        tasks: asyncio.TaskGroup,
        *,
        label: str,
        max_live: int,
        queue_timeout_s: float = wire.QUEUE_TIMEOUT_S,
        promote_after_s: float = 0.0,
    ) -> None:
        self._backend = backend
        self._lanes = lanes
        self._tasks = tasks
        self._label = label
        self._queue_timeout_s = queue_timeout_s
        self._promote_after_s = promote_after_s
        self._places = Gate(max_live)
        self._opens = Once(tasks, keep=_ANSWERS_OF_OPEN)
        self._leases: dict[str, Lease] = {}
        self._stopping = False

    async def open(self, request: wire.Open) -> wire.Opened:
        return await self._opens.do(request.request_id, lambda: self._open(request))

    async def exec(self, lease_id: str, request: wire.Exec) -> ExecResult:
        with self._use(lease_id) as lease:
            return await lease.once.do(request.request_id, lambda: self._exec(lease, request))

    async def put(self, lease_id: str, request: wire.Put) -> None:
        with self._use(lease_id) as lease:
            await lease.once.do(request.request_id, lambda: self._put(lease, request.files))

    async def get(self, lease_id: str, request: wire.Get) -> bytes:
        with self._use(lease_id) as lease:
            try:
                return await lease.box.get(request.path, request.limit)
            except (IsADirectoryError, NotADirectoryError) as error:
                raise FileNotFoundError(error.errno, "not a file", request.path) from error

    async def sweep(self, lease_id: str, request: wire.Sweep) -> int:
        with self._use(lease_id) as lease:
            return await lease.once.do(request.request_id, lambda: self._sweep(lease))

    async def renew(self, lease_id: str, request: wire.Renew) -> None:
        with self._use(lease_id) as lease:
            lease.lease_s = request.lease_s

    async def close(self, lease_id: str, request: wire.Close) -> None:
        """Idempotent: an unknown lease is a closed one."""
        if lease := self._leases.get(lease_id):
            await asyncio.wait([self._begin_close(lease, "closed by its holder")])

    async def reap(self, label: str | None) -> int:
        """What dead daemons left; never a live lease."""
        return await self._backend.reap(label)

    async def stop(self) -> None:
        """Refuse new work, end all leases."""
        self._stopping = True
        await self._opens.cancel()
        if closing := [self._begin_close(lease, "the daemon stops") for lease in self._leases.values()]:
            await asyncio.wait(closing)

    def status(self, name: str) -> SandboxHostStatus:
        return SandboxHostStatus(
            name=name,
            backend=self._backend.name,
            isolation=self._backend.isolation,
            live=self._places.running,
            lanes=self._lanes.status(),
        )

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _open(self, request: wire.Open) -> wire.Opened:
        if self._stopping:
            raise UnavailableError("the sandbox daemon is stopping", hint="Wait for its successor.")
        clock = asyncio.get_running_loop().time
        asked = clock()
        try:
            await self._places.acquire(self._queue_timeout_s)
        except TimeoutError:
            raise UnavailableError(
                f"all {self._places.cap} sandboxes of this host stayed in use for {self._queue_timeout_s:g} s",
                hint="Raise sandbox.max_live, or run fewer attempts at once.",
            ) from None
        placed = clock()
        try:
            lease = await self._prepare(request)
        except BaseException:
            self._places.release()
            raise
        self._leases[lease.id] = lease
        self._arm(lease)
        queue_s = placed - asked + lease.queue_s
        return wire.Opened(box=lease.id, queue_s=queue_s, run_s=clock() - asked - queue_s)

    async def _prepare(self, request: wire.Open) -> Lease:
        task = request.task
        async with self._lanes.enter(Lane.RESET, timeout_s=self._queue_timeout_s) as ticket:
            lease_id = secrets.token_hex(8)
            spec = BoxSpec(
                id=lease_id,
                label=self._label,
                limits=task.limits,
                workdir=task.workdir,
                env=environment(self._lanes.widths(Lane.COMMAND), task.env),
                trusted=task.trusted,
                image=task.image,
                cpus=ticket.cpus,
            )
            box = await self._backend.start(spec)
            try:
                if request.files:
                    await box.put(request.files)
                for number, line in enumerate(task.setup):
                    await self._set_up(box, task, number, line, ticket)
            except BaseException:
                await box.kill()
                raise
        once = Once(self._tasks, keep=_ANSWERS_PER_BOX)
        return Lease(lease_id, box, task, request.label, request.lease_s, once, queue_s=ticket.queue_s)

    async def _set_up(self, box: Box, task: Task, number: int, line: str, ticket: Ticket) -> None:
        env = environment(self._lanes.widths(Lane.RESET), task.env)
        result = await box.exec(line, timeout_s=task.command_timeout_s, cpus=ticket.cpus, env=env)
        if result.exit_code != 0:
            how = "timed out" if result.timed_out else "ran out of memory" if result.oom else f"exit {result.exit_code}"
            raise TaskError(
                f"task {task.id}: set-up line {number + 1} ({line[:200]!r}): {how}; output: "
                f"{result.output[-_OUTPUT_SHOWN:]!r}",
                hint=f"Correct the set-up of {task.root or task.id}, or raise its time-out or limits.",
            )

    # --- working -----------------------------------------------------------------------------------------------------

    async def _exec(self, lease: Lease, request: wire.Exec) -> ExecResult:
        if request.lane is not None:
            lane, reason = request.lane, "asked for"
        else:
            decision = classify(request.command)
            lane, reason = decision.lane, decision.reason
        async with self._lanes.enter(lane, timeout_s=self._queue_timeout_s) as ticket:
            promotion = self._schedule_promotion(lease, ticket)
            lease.executing += 1
            try:
                result = await self._run(lease, request, ticket)
            finally:
                lease.executing -= 1
                if promotion:
                    promotion.cancel()
            if ticket.lane is not lane:
                reason = f"ran longer than {self._promote_after_s:g} s"
            return msgspec.structs.replace(result, lane=ticket.lane, lane_reason=reason, queue_s=ticket.queue_s)

    async def _run(self, lease: Lease, request: wire.Exec, ticket: Ticket) -> ExecResult:
        try:
            async with asyncio.timeout(request.timeout_s + _GRACE_S):
                return await lease.box.exec(
                    request.command,
                    timeout_s=request.timeout_s,
                    cpus=ticket.cpus,
                    cwd=request.cwd,
                    env=environment(self._lanes.widths(ticket.lane), lease.task.env, request.env),
                )
        except TimeoutError:
            self._begin_close(lease, "its backend hangs")
            raise SandboxLost(
                f"sandbox {lease.id}: no answer {_GRACE_S:g} s after the command's time-out",
                hint="Look for a process in uninterruptible sleep on the sandbox host.",
            ) from None
        except SandboxLost:
            self._begin_close(lease, "its box is gone")
            raise

    def _schedule_promotion(self, lease: Lease, ticket: Ticket) -> asyncio.TimerHandle | None:
        """A command that runs long gets a place among the heavy ones if one is free then, so that it does not hold up
        the short ones. Moving a box's CPUs moves all that runs in it, so it must run alone there."""
        if not self._promote_after_s or ticket.lane is not Lane.COMMAND:
            return None

        def promote() -> None:
            if lease.executing == 1 and lease.closing is None and self._lanes.try_move(ticket, Lane.PACKAGE):
                self._tasks.create_task(self._move(lease, ticket), name=f"move {lease.id}")

        return asyncio.get_running_loop().call_later(self._promote_after_s, promote)

    async def _move(self, lease: Lease, ticket: Ticket) -> None:
        if lease.executing != 1:
            return  # it ended in this moment
        try:
            await lease.box.set_cpus(ticket.cpus)
        except (SandboxLost, OSError) as error:
            _log.warning("sandbox %s could not be moved to the package lane's CPUs: %s", lease.id, error)

    async def _put(self, lease: Lease, files: dict[str, File]) -> None:
        """Files come and processes go at grading: behind openings or closings that queue, every verdict would wait."""
        async with self._lanes.enter(Lane.VERIFY, timeout_s=self._queue_timeout_s):
            await lease.box.put(files)

    async def _sweep(self, lease: Lease) -> int:
        async with self._lanes.enter(Lane.VERIFY, timeout_s=self._queue_timeout_s):
            return await lease.box.sweep()

    # --- ending ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _use(self, lease_id: str) -> Iterator[Lease]:
        lease = self._leases.get(lease_id)
        if lease is None or lease.closing is not None:
            raise SandboxLost(
                f"sandbox {lease_id} is not here: closed, expired, or lost with an earlier daemon",
                hint="Open a new one; renew leases that must outlive long pauses.",
            )
        lease.busy += 1
        if lease.timer:
            lease.timer.cancel()
            lease.timer = None
        try:
            yield lease
        finally:
            lease.busy -= 1
            if not lease.busy and lease.closing is None:
                self._arm(lease)

    def _arm(self, lease: Lease) -> None:
        why = f"unused for {lease.lease_s:g} s"
        lease.timer = asyncio.get_running_loop().call_later(lease.lease_s, self._begin_close, lease, why)

    def _begin_close(self, lease: Lease, why: str) -> asyncio.Task[None]:
        if lease.closing is None:
            if lease.timer:
                lease.timer.cancel()
            _log.debug("sandbox %s (%s) ends: %s", lease.id, lease.label, why)
            lease.closing = self._tasks.create_task(self._end(lease), name=f"close {lease.id}")
        return lease.closing

    async def _end(self, lease: Lease) -> None:
        try:
            await lease.once.cancel()
            async with self._lanes.enter(Lane.CLEANUP, timeout_s=self._queue_timeout_s):
                await lease.box.kill()
        except (
            Exception
        ):  # contained here: one box that will not die must not end the daemon; the reaper meets it again
            _log.exception("sandbox %s could not be cleaned up", lease.id)
        finally:
            del self._leases[lease.id]
            self._places.release()
