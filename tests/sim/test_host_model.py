"""The host's laws: CPUs are shared evenly and never exceeded, lanes queue in order, cancelling frees the place."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import SandboxLost
from agentrl.records import Lane
from agentrl.sim.clock import run
from agentrl.sim.fleet.host import HostModel, HostPlan, LanePlan, isolated, pooled


def one_lane(cap: int, cpus: float) -> HostPlan:
    return HostPlan(cpus=cpus, lanes={lane: LanePlan(cap=cap, cpus=cpus) for lane in Lane})


def test_operations_share_a_set_evenly() -> None:
    async def main() -> list[float]:
        host = HostModel("h", one_lane(8, 2.0))
        runs = [host.run(Lane.COMMAND, cpu_s) for cpu_s in (1.0, 1.0, 1.0, 4.0)]
        return [run_s for _, run_s in await asyncio.gather(*runs)]

    # 4 on 2 CPUs: half speed until 3 have done 1 s of work each, then the last one alone
    assert run(main()) == pytest.approx([2.0, 2.0, 2.0, 5.0])


def test_lanes_queue_in_order_and_wait_without_cpu() -> None:
    async def main() -> list[tuple[float, float]]:
        host = HostModel("h", one_lane(1, 1.0))
        return await asyncio.gather(*(host.run(Lane.PACKAGE, 1.0, wait_s=2.0) for _ in range(3)))

    assert run(main()) == [pytest.approx(pair) for pair in ((0.0, 3.0), (3.0, 3.0), (6.0, 3.0))]


def test_isolated_lanes_leave_one_another_and_the_engines_alone() -> None:
    class Engine:
        slowdown = 1.0

    async def main(plan: HostPlan) -> tuple[float, float]:
        host, engine, worst = HostModel("h", plan), Engine(), 1.0
        host.serve(engine)
        async with asyncio.TaskGroup() as group:
            verify = group.create_task(host.run(Lane.VERIFY, 1.0))
            for _ in range(200):
                group.create_task(host.run(Lane.PACKAGE, 10.0, width=4.0))
            await asyncio.sleep(0.5)
            worst = engine.slowdown
        return verify.result()[1], worst

    alone, slowdown = run(main(isolated(32.0, 4.0)))
    assert (alone, slowdown) == (pytest.approx(1.0), 1.0)
    beside, slowdown = run(main(pooled(32.0, 4.0)))
    assert beside == pytest.approx((200 * 4 + 1 + 4) / 32, rel=0.01)
    assert slowdown == pytest.approx((200 * 4 + 1 + 4) / 32)
    greedy, worse = run(main(pooled(32.0, 4.0, greed=4.0)))
    assert greedy > 2 * beside
    assert worse > 3 * slowdown


def test_lanes_of_one_machine_queue_and_share_its_cpus_with_whatever_else_works_there() -> None:
    async def main() -> tuple[list[tuple[float, float]], float]:
        host = HostModel("h", pooled(2.0, 0.0, caps={Lane.VERIFY: 1}))
        loop = asyncio.get_running_loop()
        host.occupy(2)  # an engine of two threads,
        loop.call_later(2.0, host.occupy, -2)  # which stands still again
        verified = asyncio.gather(*(host.run(Lane.VERIFY, 1.5) for _ in range(2)))
        await host.compute(1.5)
        return await verified, loop.time()

    # 4 threads on 2 CPUs for 2 s, then 2; the second verification begins when the first one ends
    pairs, worked_s = run(main())
    assert pairs == [pytest.approx((0.0, 2.5)), pytest.approx((2.5, 1.5))]
    assert worked_s == pytest.approx(4.0)


@given(seed=st.integers(0, 10_000), cap=st.integers(1, 5), shared=st.booleans())
@settings(max_examples=25, deadline=None)
def test_work_is_conserved_and_places_come_back(seed: int, cap: int, shared: bool) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        plan = pooled(3.0, 1.0, greed=2.0) if shared else one_lane(cap, 3.0)
        host, done = HostModel("h", plan), 0.0
        loop = asyncio.get_running_loop()

        async def client() -> None:
            nonlocal done
            for _ in range(4):
                await asyncio.sleep(rng.expovariate(1.0))
                cpu_s, width = rng.uniform(0.1, 5.0), rng.choice([1.0, 2.0])
                try:
                    async with asyncio.timeout(rng.choice([None, 3.0])):
                        _, run_s = await host.run(rng.choice(list(Lane)), cpu_s, rng.choice([0.0, 1.0]), width=width)
                except TimeoutError:
                    continue
                assert run_s >= cpu_s / width - 1e-6
                done += cpu_s

        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(client())
        assert done - 1e-6 <= host.busy_s() <= loop.time() * 3.0 * (1 if shared else len(Lane)) + 1e-6
        if not shared:  # every place is free again
            waits = await asyncio.gather(*(host.run(lane, 1.0) for lane in Lane for _ in range(cap)))
            assert max(queue_s for queue_s, _ in waits) == 0.0

    run(main())


def test_a_killed_host_loses_its_operations() -> None:
    async def main() -> None:
        host = HostModel("h", one_lane(1, 1.0))
        asyncio.get_running_loop().call_later(1.0, host.kill, "fire")
        ends = await asyncio.gather(*(host.run(Lane.COMMAND, 10.0, w) for w in (0.0, 5.0)), return_exceptions=True)
        assert {type(end) for end in ends} == {SandboxLost}
        with pytest.raises(SandboxLost, match="fire"):
            await host.run(Lane.COMMAND, 1.0)

    run(main())
