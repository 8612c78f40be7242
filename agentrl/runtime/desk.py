"""Where trainers come for batches: ports.Trainer on the driver's side, claim / renew / ack on the trainer's.

At most one batch is out. It stays on the desk until it is acknowledged: a lease that runs out only makes it claimable
again, so a trainer that died loses nothing. A claim by the holder of the lease (a restarted trainer) takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.errors import AgentRLError
from agentrl.records import Batch, StepReport, Version
from agentrl.wire import Claim, ClaimRequest


class WrongVersion(AgentRLError):
    def __init__(self, expected: Version, held: Version) -> None:
        super().__init__(
            f"the trainer holds version {held}, the run trains from version {expected}",
            hint=f"load the checkpoint or the weights of version {expected} and claim again",
        )
        self.expected = expected


class LeaseGone(AgentRLError):
    pass


class RunOver(AgentRLError):
    pass


@dataclass(slots=True)
class _Lease:
    id: str
    trainer: str
    until: float


class TrainerDesk:
    """expected: the version the run trained last. clock: the run's. Safe within one event loop."""

    def __init__(self, expected: Version, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected = expected
        self._changed = asyncio.Condition()
        self._batch: Batch | None = None
        self._lease: _Lease | None = None
        self._settled: asyncio.Future[StepReport] | None = None  # of the newest batch; kept for acks that come twice
        self._asking = 0  # claims that wait
        self._here: set[str] = set()  # trainers that have claimed and do not know yet that the run is over
        self._told = False  # the driver knows that a trainer waits
        self._closed = False
        self.renewed = 0  # leases renewed so far: the sign of life of a long step

    def expect(self, version: Version) -> None:
        """The version that a resumed run trains from; before the first claim."""
        self._expected = version

    # --- the driver's side ------------------------------------------------------------------------------------------

    async def wait_ready(self) -> Version:
        async with self._changed:
            await self._changed.wait_for(lambda: self._asking > 0 and self._batch is None and not self._told)
            self._told = True
            return self._expected

    async def step(self, batch: Batch) -> StepReport:
        settled: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()
        async with self._changed:
            self._batch, self._lease, self._settled = batch, None, settled
            self._changed.notify_all()
        return await settled

    async def aclose(self) -> None:
        """The run is over: every waiting and later claim is told so."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def dismissed(self, *, within_s: float) -> bool:
        """After `aclose`: whether every trainer came once more and was told. One may be saving its last step yet."""
        try:
            async with self._changed, asyncio.timeout(within_s):
                await self._changed.wait_for(lambda: not self._here)
        except TimeoutError:
            return False
        return True

    # --- the trainer's side -----------------------------------------------------------------------------------------

    async def claim(self, request: ClaimRequest) -> Claim | None:
        """None when nothing came within wait_s. Raises WrongVersion, RunOver."""
        self._asking += 1
        self._here.add(request.trainer)
        try:
            async with self._changed, asyncio.timeout(max(request.wait_s, 0.0)):
                self._changed.notify_all()
                while True:
                    self._refuse(request)
                    if self._batch is not None and self._free_for(request.trainer):
                        return self._hand_out(self._batch, request)
                    await self._wait_for_change_or_lease_end()
        except TimeoutError:
            return None
        finally:
            self._asking -= 1

    def _refuse(self, request: ClaimRequest) -> None:
        if self._closed:
            self._here.discard(request.trainer)
            self._changed.notify_all()
            raise RunOver("the run is over")
        if request.version != self._expected:
            raise WrongVersion(self._expected, request.version)

    def _free_for(self, trainer: str) -> bool:
        return self._lease is None or self._lease.trainer == trainer or self._lease.until <= self._clock()

    def _hand_out(self, batch: Batch, request: ClaimRequest) -> Claim:
        self._lease = _Lease(uuid.uuid4().hex, request.trainer, self._clock() + request.lease_s)
        return Claim(lease=self._lease.id, batch=batch)

    async def _wait_for_change_or_lease_end(self) -> None:
        left = None if self._lease is None else max(0.0, self._lease.until - self._clock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._changed.wait()

    async def renew(self, lease: str, lease_s: float) -> None:
        if self._lease is None or self._lease.id != lease:
            raise LeaseGone(f"lease {lease} is not in force", hint="claim again")
        self._lease.until = self._clock() + lease_s
        self.renewed += 1

    def owes(self, lease: str, version: Version | None = None) -> None:
        """Whether the holder of `lease` may bring weights (those of `version`). Raises LeaseGone."""
        if self._lease is None or self._lease.id != lease or self._batch is None:
            raise LeaseGone(f"lease {lease} is not in force", hint="claim again")
        if version is not None and version != self._batch.version + 1:
            raise LeaseGone(f"batch {self._batch.id} makes version {self._batch.version + 1}, not {version}")

    async def ack(self, lease: str, report: StepReport) -> None:
        """Idempotent by batch id. Raises LeaseGone for a batch that is not out, or is out to somebody else."""
        async with self._changed:
            done = self._settled is not None and self._settled.done() and not self._settled.cancelled()
            if done and self._settled is not None and self._settled.result().batch == report.batch:
                return
            if self._batch is None or self._batch.id != report.batch or report.version != self._batch.version + 1:
                raise LeaseGone(f"batch {report.batch} (version {report.version}) is not out", hint="claim again")
            if self._lease is not None and self._lease.id != lease:
                raise LeaseGone(f"batch {report.batch} was given to {self._lease.trainer}", hint="claim again")
            if self._settled is not None and not self._settled.done():
                self._settled.set_result(report)
            self._expected, self._batch, self._lease, self._told = report.version, None, None, False
            self._changed.notify_all()
