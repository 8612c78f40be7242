from __future__ import annotations

import asyncio

import pytest

from agentrl.sim.clock import Deadlock, run


def test_time_jumps_and_order_is_kept() -> None:
    async def main() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def say(after: float, word: str) -> None:
            await asyncio.sleep(after)
            seen.append((asyncio.get_running_loop().time(), word))

        async with asyncio.TaskGroup() as group:
            group.create_task(say(3600.0, "late"))
            group.create_task(say(1.5, "early"))
        return seen

    assert run(main()) == [(1.5, "early"), (3600.0, "late")]


def test_a_hang_is_an_error_that_names_the_waiter() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="the one who waits")

    with pytest.raises(Deadlock, match="the one who waits"):
        run(main())


def test_a_deadline_ends_a_wait_at_its_time() -> None:
    async def main() -> float:
        try:
            async with asyncio.timeout(20.0):
                await asyncio.Event().wait()
        except TimeoutError:
            return asyncio.get_running_loop().time()
        raise AssertionError

    assert run(main()) == 20.0
