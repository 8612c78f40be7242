"""Lanes and request memory: FIFO, caps, cancellation, one execution per id."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DeadlineError, InfraError, TaskError
from agentrl.recipe.schema import LaneCaps
from agentrl.records import Lane
from agentrl.sandbox.cpusets import Cpu, Topology, plan_cpus
from agentrl.sandbox.lanes import Gate, Lanes, environment
from agentrl.sandbox.once import Once

FOREVER_S = 60.0


def lanes(cpus: int = 8, **caps: int) -> Lanes:
    return Lanes(plan_cpus(Topology(cpus=tuple(Cpu(id=i, core=i) for i in range(cpus)))), LaneCaps(**caps))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["enter", "cancel", "leave"]), st.integers(0, 9))))
def test_a_gate_never_passes_its_cap_never_idles_and_keeps_order(cap: int, steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        gate = Gate(cap)
        entered: list[int] = []
        leave: dict[int, asyncio.Event] = {}
        tasks: dict[int, asyncio.Task[None]] = {}
        number = itertools.count()

        async def visit(me: int) -> None:
            await gate.acquire(FOREVER_S)
            entered.append(me)
            try:
                await leave[me].wait()
            finally:
                gate.release()

        for action, pick in steps:
            alive = [i for i, task in tasks.items() if not task.done()]
            if action == "enter" or not alive:
                me = next(number)
                leave[me] = asyncio.Event()
                tasks[me] = asyncio.create_task(visit(me))
            elif action == "cancel":
                tasks[alive[pick % len(alive)]].cancel()
            else:
                leave[alive[pick % len(alive)]].set()
            await settle()
            inside = [i for i in entered if not tasks[i].done()]
            waiting = [i for i, task in tasks.items() if not task.done() and i not in entered]
            assert gate.running == len(inside) <= cap
            assert gate.queued == len(waiting)
            assert not waiting or len(inside) == cap
            assert entered == sorted(entered)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert (gate.running, gate.queued) == (0, 0)

    asyncio.run(scenario())


def test_cancelled_in_the_moment_of_its_turn_a_waiter_passes_it_on() -> None:
    async def scenario() -> None:
        gate = Gate(1)
        await gate.acquire(FOREVER_S)
        first, second = (asyncio.create_task(gate.acquire(FOREVER_S)) for _ in range(2))
        await settle()
        gate.release()  # hands the token to `first`, which is cancelled before it runs
        first.cancel()
        await second
        assert first.cancelled()
        gate.release()
        assert gate.running == 0

    asyncio.run(scenario())


def test_a_full_lane_refuses_after_the_deadline_and_says_who_holds_it() -> None:
    async def scenario() -> None:
        full = lanes(command=1)
        async with full.enter(Lane.COMMAND, timeout_s=FOREVER_S):
            with pytest.raises(DeadlineError, match="command lane gave no place"):
                async with full.enter(Lane.COMMAND, timeout_s=0.01):
                    pass
            async with full.enter(Lane.VERIFY, timeout_s=0.01) as other:
                assert other.lane is Lane.VERIFY
        async with full.enter(Lane.COMMAND, timeout_s=0.01):
            pass
        status = {s.lane: s for s in full.status()}[Lane.COMMAND]
        assert (status.running, status.queued, status.done) == (0, 0, 2)

    asyncio.run(scenario())


def test_a_holder_that_fails_gives_its_token_back() -> None:
    async def scenario() -> None:
        one = lanes(command=1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with one.enter(Lane.COMMAND, timeout_s=0.01):
                    raise ZeroDivisionError
        assert {s.lane: s for s in one.status()}[Lane.COMMAND].running == 0

    asyncio.run(scenario())


def test_moving_takes_a_free_place_and_frees_the_old_one() -> None:
    async def scenario() -> None:
        host = lanes(command=1, package=1)
        async with host.enter(Lane.COMMAND, timeout_s=1) as first:
            assert host.try_move(first, Lane.PACKAGE)
            assert first.cpus == host.plan.lanes[Lane.PACKAGE]
            async with host.enter(Lane.COMMAND, timeout_s=0.01) as second:
                assert not host.try_move(second, Lane.PACKAGE)  # none free: it stays
                assert second.lane is Lane.COMMAND
        assert all(s.running == 0 for s in host.status())
        assert {s.lane: s.done for s in host.status() if s.done} == {Lane.COMMAND: 1, Lane.PACKAGE: 1}

    asyncio.run(scenario())


def test_caps_default_to_twice_the_cpus_and_widths_to_their_number() -> None:
    host = lanes(24, verify=3)
    for status in host.status():
        expected = {Lane.VERIFY: 3, Lane.PACKAGE: 16}.get(status.lane, 2 * len(status.cpus))
        assert status.cap == expected
    width = len(host.plan.lanes[Lane.COMMAND])
    assert host.widths(Lane.COMMAND)["MAKEFLAGS"] == f"-j{width}"
    assert environment(host.widths(Lane.COMMAND), {"OMP_NUM_THREADS": "9"}, None)["OMP_NUM_THREADS"] == "9"


class Counting:
    """Work that counts its starts and waits to be let go."""

    def __init__(self) -> None:
        self.started = 0
        self.stopped = 0
        self.go = asyncio.Event()

    async def work(self) -> int:
        self.started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return 7


def test_a_repeated_id_joins_and_then_repeats_the_answer() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            once, job = Once(tasks, keep=4), Counting()
            callers = [asyncio.create_task(once.do("a", job.work)) for _ in range(3)]
            await settle()
            callers[0].cancel()  # one of three goes away: the work goes on
            await settle()
            job.go.set()
            assert [await c for c in callers[1:]] == [7, 7]
            assert await once.do("a", job.work) == 7
            assert (job.started, job.stopped) == (1, 0)

    asyncio.run(scenario())


def test_when_the_last_caller_goes_the_work_is_cancelled_and_never_done_again() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            once, job = Once(tasks, keep=4), Counting()
            caller = asyncio.create_task(once.do("a", job.work))
            await settle()
            caller.cancel()
            await settle()
            assert (job.started, job.stopped) == (1, 1)
            with pytest.raises(InfraError, match="cancelled"):
                await once.do("a", job.work)
            assert job.started == 1

    asyncio.run(scenario())


def test_errors_are_answers_too_and_memory_is_bounded() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            once = Once(tasks, keep=3)
            starts: list[str] = []

            def failing(name: str) -> Coroutine[Any, Any, None]:
                async def work() -> None:
                    starts.append(name)
                    raise TaskError(name)

                return work()

            for name in ["a", "b", "c", "d", "d"]:
                with pytest.raises(TaskError, match=name):
                    await once.do(name, partial(failing, name))
            assert starts == ["a", "b", "c", "d"]
            with pytest.raises(TaskError):
                await once.do("a", lambda: failing("a again"))  # long forgotten
            assert starts[-1] == "a again"

    asyncio.run(scenario())
