"""Work that is finished whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.finish import finish


def test_any_number_of_cancellations_are_heard_at_its_end() -> None:
    async def check() -> None:
        go, done = asyncio.Event(), list[str]()

        async def work() -> None:
            await go.wait()
            done.append("whole")

        waiting = asyncio.create_task(finish(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert done == ["whole"]

    asyncio.run(check())


def test_its_result_and_its_failure_are_the_callers() -> None:
    async def work(value: int) -> float:
        return 1 / value

    assert asyncio.run(finish(work(2), deadline_s=10.0)) == 0.5
    with pytest.raises(ZeroDivisionError):
        asyncio.run(finish(work(0)))


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_is_not_done_in_time_is_cancelled(cancelled: bool) -> None:
    async def check() -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        waiting = asyncio.create_task(finish(work(), deadline_s=0.01))
        await asyncio.sleep(0)
        if cancelled:
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else TimeoutError):
            await waiting
        assert ended.is_set()

    asyncio.run(check())
