"""The trainer's desk, in virtual time: leases, redelivery, idempotent acks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentrl.records import Batch, StepReport, Version
from agentrl.runtime.desk import LeaseGone, RunOver, TrainerDesk, WrongVersion
from agentrl.sim.clock import run
from agentrl.wire import Claim, ClaimRequest


def batch(number: int, version: int = 0) -> Batch:
    return Batch(id=number, version=Version(version), bound=4, proofs=(), trajectories=())


def report(number: int, version: int) -> StepReport:
    return StepReport(batch=number, version=Version(version), seconds=1.0)


def ask(version: int = 0, *, trainer: str = "a", lease_s: float = 10.0, wait_s: float = 5.0) -> ClaimRequest:
    return ClaimRequest(trainer=trainer, version=Version(version), lease_s=lease_s, wait_s=wait_s)


def with_desk(body: Callable[[TrainerDesk, asyncio.TaskGroup], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = TrainerDesk(Version(0), asyncio.get_running_loop().time)
        async with asyncio.TaskGroup() as group:
            await body(desk, group)

    run(main())


async def claimed(desk: TrainerDesk, request: ClaimRequest) -> Claim:
    claim = await desk.claim(request)
    assert claim is not None
    return claim


def test_a_claim_waits_for_a_batch_and_an_ack_settles_the_step() -> None:
    async def body(desk: TrainerDesk, group: asyncio.TaskGroup) -> None:
        waiting = group.create_task(desk.claim(ask()))
        assert await desk.wait_ready() == 0
        step = group.create_task(desk.step(batch(0)))
        claim = await waiting
        assert claim is not None
        assert claim.batch.id == 0
        await desk.ack(claim.lease, report(0, 1))
        assert (await step).version == 1
        await desk.ack(claim.lease, report(0, 1))  # said twice

    with_desk(body)


def test_nothing_within_wait_s_is_none_and_ready_is_told_once_per_step() -> None:
    async def body(desk: TrainerDesk, group: asyncio.TaskGroup) -> None:
        assert await desk.claim(ask(wait_s=2.0)) is None
        assert asyncio.get_running_loop().time() == 2.0
        waiting = group.create_task(desk.claim(ask(wait_s=100.0)))
        await desk.wait_ready()
        again = group.create_task(desk.wait_ready())
        await asyncio.sleep(1.0)
        assert not again.done()
        step = group.create_task(desk.step(batch(0)))
        claim = await waiting
        assert claim is not None
        await desk.ack(claim.lease, report(0, 1))
        await step
        next_claim = group.create_task(desk.claim(ask(1)))
        assert await again == 1
        assert await next_claim is None

    with_desk(body)


def test_a_lease_that_runs_out_frees_the_batch_and_a_renewed_one_does_not() -> None:
    async def body(desk: TrainerDesk, group: asyncio.TaskGroup) -> None:
        group.create_task(desk.step(batch(0)))
        await asyncio.sleep(0)
        first = await claimed(desk, ask(trainer="a"))
        await asyncio.sleep(8.0)
        await desk.renew(first.lease, 10.0)
        second = await claimed(desk, ask(trainer="b", wait_s=60.0))
        assert asyncio.get_running_loop().time() == 18.0
        assert second.batch.id == 0
        with pytest.raises(LeaseGone):
            await desk.renew(first.lease, 10.0)
        with pytest.raises(LeaseGone):
            await desk.ack(first.lease, report(0, 1))
        await desk.ack(second.lease, report(0, 1))

    with_desk(body)


def test_a_restarted_trainer_gets_its_batch_back_at_once() -> None:
    async def body(desk: TrainerDesk, group: asyncio.TaskGroup) -> None:
        group.create_task(desk.step(batch(0)))
        await asyncio.sleep(0)
        await claimed(desk, ask(lease_s=1000.0))
        again = await claimed(desk, ask(lease_s=1000.0))
        assert asyncio.get_running_loop().time() == 0.0
        await desk.ack(again.lease, report(0, 1))

    with_desk(body)


def test_the_end_waits_for_a_trainer_that_is_still_saving() -> None:
    async def body(desk: TrainerDesk, group: asyncio.TaskGroup) -> None:
        step = group.create_task(desk.step(batch(0)))
        await asyncio.sleep(0)
        claim = await claimed(desk, ask())
        await desk.ack(claim.lease, report(0, 1))
        await step
        await desk.aclose()
        assert not await desk.dismissed(within_s=2.0)
        assert asyncio.get_running_loop().time() == 2.0

        async def come_back() -> None:
            await asyncio.sleep(3.0)
            with pytest.raises(RunOver):
                await desk.claim(ask(1))

        group.create_task(come_back())
        assert await desk.dismissed(within_s=10.0)
        assert asyncio.get_running_loop().time() == 5.0

    with_desk(body)


def test_a_wrong_version_and_a_run_that_is_over_are_refused() -> None:
    async def body(desk: TrainerDesk, group: asyncio.TaskGroup) -> None:
        with pytest.raises(WrongVersion) as refused:
            await desk.claim(ask(3))
        assert refused.value.expected == 0

        async def close() -> None:
            await asyncio.sleep(1.0)
            await desk.aclose()

        waited, _ = await asyncio.gather(desk.claim(ask(wait_s=100.0)), close(), return_exceptions=True)
        assert isinstance(waited, RunOver)

    with_desk(body)
