"""The engine's laws: tokens and KV are conserved whatever happens to its requests; time follows from the steps."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import EngineLost, UserError
from agentrl.records import Version
from agentrl.sim.clock import run
from agentrl.sim.fleet.constants import GLM_5_2
from agentrl.sim.fleet.engine import EngineModel
from agentrl.sim.fleet.rank import SimReply
from agentrl.sim.fleet.roofline import Flat, Roofline, Serving, Topology
from agentrl.sim.fleet.throughput import point

SMALL = 4_000.0  # tokens of a pool that a few conversations fill


def small(ranks: int = 2, slots: int = 3) -> Flat:
    costs = Flat(2, ranks=ranks, slots=slots)
    costs.pool_tokens, costs.chunk, costs.accepted = SMALL, 300.0, 2.5
    return costs


def audited(engine: EngineModel) -> None:
    """used + free = total in each rank, counted from the entries."""
    engine.loads()  # bring it up to now
    for rank in engine.ranks:
        pool = rank.pool
        step = engine._step
        for sequence in rank.running:
            assert sequence.held is not None
            grown = rank._sampled(sequence, step) - sequence.done
            sequence.held.own += grown  # what release would add
        running = [s.held for s in rank.everyone() if s.held is not None]
        used = pool.audit(running)
        for sequence in rank.running:
            assert sequence.held is not None
            sequence.held.own -= rank._sampled(sequence, step) - sequence.done
        assert used + pool.free == pytest.approx(pool.total, abs=1e-3)
        assert pool.free >= -1e-3
        assert pool.idle >= -1e-3
        assert len(rank.running) + (rank.prefilling is not None) <= rank.costs.slots
        assert rank.work.running == len(rank.running)


async def conversation(engine: EngineModel, name: int, rng: random.Random, replies: list[SimReply]) -> None:
    group, tokens = name % 3, 200 + 50 * (name % 3)
    opening = tokens
    for _ in range(rng.randint(1, 5)):
        await asyncio.sleep(rng.choice([0.0, rng.expovariate(0.05)]))
        wanted = rng.randint(1, 250)
        call = engine.generate(
            name, group, rank=rng.randrange(2), prompt_tokens=tokens, new_tokens=wanted, shared_tokens=opening
        )
        try:
            async with asyncio.timeout(rng.choice([None, None, 30.0])):
                reply = await call
        except TimeoutError:
            continue
        assert reply.finish == "abort" or reply.tokens == wanted
        assert sum(n for _, n in reply.spans) == reply.tokens
        assert reply.cached_tokens < reply.prompt_tokens
        replies.append(reply)
        tokens += reply.tokens + rng.randint(1, 100)


async def trouble(engine: EngineModel, rng: random.Random) -> None:
    for version in range(1, 6):
        await asyncio.sleep(rng.expovariate(0.02))
        match rng.randrange(4):
            case 0:
                engine.pause()
                await asyncio.sleep(rng.uniform(0, 20))
                engine.resume()
            case 1:
                await engine.swap(Version(version))
            case 2:
                engine.abort_all()
            case _:
                engine.slowdown = rng.choice([1.0, 3.0])
        audited(engine)


@given(seed=st.integers(0, 10_000), slots=st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_tokens_and_memory_are_conserved(seed: int, slots: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        engine = EngineModel("e", small(slots=slots))
        replies: list[SimReply] = []
        async with asyncio.TaskGroup() as group:
            for name in range(12):
                group.create_task(conversation(engine, name, random.Random(f"{seed}/{name}"), replies))
            group.create_task(trouble(engine, rng))
        audited(engine)
        for rank in engine.ranks:
            assert rank.load().running == rank.load().waiting == 0
            assert rank.pool.held == pytest.approx(0.0, abs=1e-3)
        assert engine.generated_tokens >= sum(reply.tokens for reply in replies)

    run(main())


def test_the_sum_over_requests_is_what_the_engine_says() -> None:
    async def main() -> None:
        engine = EngineModel("e", small(slots=50))  # 50 slots overflow the pool: retractions
        calls = [engine.generate(i, i, rank=i % 2, prompt_tokens=100 + i, new_tokens=200 + 3 * i) for i in range(40)]
        replies = await asyncio.gather(*calls)
        assert engine.generated_tokens == sum(r.tokens for r in replies) == sum(200 + 3 * i for i in range(40))
        assert sum(rank.retractions for rank in engine.ranks) > 0
        audited(engine)

    run(main())


def test_history_and_openings_are_found_again_where_they_were_computed() -> None:
    async def main() -> list[int]:
        engine = EngineModel("e", Roofline(Serving(mtp=0)))

        async def turn(name: int, rank: int, prompt: int, space: int = 0) -> int:
            reply = await engine.generate(
                name, "g", rank=rank, prompt_tokens=prompt, new_tokens=50, namespace=space, shared_tokens=1_000
            )
            return reply.cached_tokens

        return [
            await turn(0, 0, 1_000),  # nothing is there yet
            await turn(1, 0, 1_000),  # a sibling's opening; the last token is always computed
            await turn(0, 0, 1_250),  # its own history
            await turn(0, 1, 1_500),  # another rank knows nothing
            await turn(2, 1, 1_000),  # but now the opening
            await turn(0, 0, 1_750, space=1),  # other weights: nothing is reused
        ]

    assert run(main()) == [0, 999, 1_049, 0, 999, 0]


def test_least_recently_used_history_is_evicted_first() -> None:
    async def main() -> tuple[int, int]:
        engine = EngineModel("e", small(ranks=1))
        for name in range(5):  # 5 * 900 > 4,000: the first one makes room
            await engine.generate(name, name, rank=0, prompt_tokens=800, new_tokens=100)
        first = await engine.generate(4, 4, rank=0, prompt_tokens=1_000, new_tokens=10)
        last = await engine.generate(0, 0, rank=0, prompt_tokens=1_000, new_tokens=10)
        audited(engine)
        return first.cached_tokens, last.cached_tokens

    newest, oldest = run(main())
    assert newest == 899  # all but the last token, which was sampled and never computed
    assert oldest < 899


def test_a_swap_freezes_in_place_and_marks_the_tokens() -> None:
    async def main() -> SimReply:
        engine = EngineModel("e", Flat(1), version=Version(3))  # one token a second
        engine.costs.swap_s = lambda: 7.0  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            reply = group.create_task(engine.generate(0, 0, rank=0, prompt_tokens=10, new_tokens=100))
            await asyncio.sleep(40.0)
            assert await engine.swap(Version(4)) == 7.0
        assert asyncio.get_running_loop().time() == pytest.approx(107.0)
        return reply.result()

    reply = run(main())
    assert reply.spans == ((3, 40), (4, 60))
    assert reply.decode_s == pytest.approx(107.0)


def test_draining_ends_what_runs_and_keeps_the_rest_waiting() -> None:
    async def main() -> tuple[float, float]:
        engine = EngineModel("e", Flat(1, slots=1))
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for name in range(2):
                group.create_task(engine.generate(name, 0, rank=0, prompt_tokens=10, new_tokens=10))
            await asyncio.sleep(1.0)
            await engine.drain()
            drained = loop.time()
            assert engine.loads()[0].waiting == 1
            await asyncio.sleep(5.0)
            engine.reopen()
        return drained, loop.time()

    assert run(main()) == (pytest.approx(10.0), pytest.approx(25.0))


def test_a_killed_engine_loses_its_requests_and_takes_no_more() -> None:
    async def main() -> None:
        engine = EngineModel("e", Flat(1))
        asyncio.get_running_loop().call_later(1.0, engine.kill, "power")
        with pytest.raises(EngineLost, match="power"):
            await engine.generate(0, 0, rank=0, prompt_tokens=10, new_tokens=10)
        with pytest.raises(EngineLost, match="power"):
            await engine.generate(1, 0, rank=0, prompt_tokens=10, new_tokens=10)

    run(main())


def test_what_can_never_fit_is_refused() -> None:
    async def main() -> None:
        engine = EngineModel("e", small())
        with pytest.raises(UserError, match="do not fit"):
            await engine.generate(0, 0, rank=0, prompt_tokens=3_990, new_tokens=20)

    run(main())


def test_the_model_has_the_published_size() -> None:
    model = GLM_5_2
    active = model.moe_layers * model.top_k * model.expert_params + model.resident_params
    active += model.layers * model.attention_params
    assert model.total_params == pytest.approx(744e9, rel=0.01)
    assert active == pytest.approx(40e9, rel=0.05)


@pytest.mark.parametrize("topology", ["tp8", "dp8ep8"])
def test_more_of_anything_takes_longer(topology: Topology) -> None:
    serving = Serving(topology=topology)
    steps = [point(serving, running, 8_000).step_s for running in (1, 8, 64, 512)]
    assert steps == sorted(steps)
    assert point(serving, 64, 32_000).step_s > point(serving, 64, 8_000).step_s
    assert point(Serving(topology=topology, offload=True), 64, 8_000).step_s > point(serving, 64, 8_000).step_s


def test_bf16_kv_halves_the_pool_and_a_shared_pool_is_one_gpus() -> None:
    fp8, bf16 = Roofline(Serving(topology="tp8")), Roofline(Serving(topology="tp8", kv_dtype="bf16"))
    assert 1.8 < fp8.pool_tokens / bf16.pool_tokens < 2.0
    lanes = Roofline(Serving(topology="dp8ep8"))
    assert 7.0 < lanes.ranks * lanes.pool_tokens / fp8.pool_tokens < 8.0


def test_contexts_grow_as_decoding_goes_on() -> None:
    """The closed form of a step that lengthens agrees with many short stretches of it."""

    async def main(stretches: int) -> float:
        engine = EngineModel("e", Roofline(Serving(topology="tp8")))
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            calls = [engine.generate(i, i, rank=0, prompt_tokens=9_000, new_tokens=8_000) for i in range(64)]
            tasks = [group.create_task(call) for call in calls]
            for _ in range(stretches):
                await asyncio.sleep(0.5)
                engine.slowdown = 1.0 + 1e-12 * (engine.slowdown == 1.0)  # works the pace out anew
        assert all(task.result().tokens == 8_000 for task in tasks)
        return loop.time()

    assert run(main(0)) == pytest.approx(run(main(200)), rel=0.01)
