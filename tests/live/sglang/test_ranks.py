"""Attention data parallelism in real SGLang: two ranks in one engine, each with its own cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from agentrl.records import Version
from agentrl.serve.sglang import SGLangEngine
from tests.engines import (
    Served,
    ask,
    client,
    logprob_gap,
    make_checkpoint,
    prompt_of,
    serve_sglang,
    until,
)
from tests.live.sglang.marks import needs_sglang, two_ranks

pytestmark = [*needs_sglang, pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a core for each rank")]

EXACT = 1e-4  # float32, hundreds of tokens; a mark that is off by one token is off by more than 0.1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ranks")
    first, second = make_checkpoint(folder / "first", 1), make_checkpoint(folder / "second", 2)
    with serve_sglang(folder, first, second, **two_ranks(slots=4)) as running:
        yield running


def test_it_says_that_it_has_two_ranks(served: Served) -> None:
    info = served.info
    assert (info.ranks, info.slots) == (2, 8)
    assert info.kv_tokens >= 2 * 16_384

    async def check() -> None:
        async with client(served) as engine:
            assert [load.rank for load in await engine.loads(deadline_s=10)] == [0, 1]

    asyncio.run(check())


def test_a_request_runs_where_it_is_sent_and_each_rank_has_its_own_history(served: Served) -> None:
    async def check() -> None:
        prompt = prompt_of(200, seed=5)
        async with client(served) as engine:
            first = await ask(engine, prompt, 8, rank=1)
            again = await ask(engine, prompt, 8, rank=1)
            elsewhere = await ask(engine, prompt, 8, rank=0)
        assert [reply.rank for reply in (first, again, elsewhere)] == [1, 1, 0]
        assert first.cached_tokens == elsewhere.cached_tokens == 0
        assert again.cached_tokens >= len(prompt) - 1
        assert all(logprob_gap(reply, prompt, served.holds) < EXACT for reply in (first, again, elsewhere))

    asyncio.run(check())


def test_new_weights_reach_both_ranks_under_running_requests(served: Served) -> None:
    async def check() -> None:
        prompts = [prompt_of(40 + n, seed=n) for n in range(4)]
        async with client(served) as engine, asyncio.TaskGroup() as group:
            calls = [group.create_task(ask(engine, p, 300, rank=i % 2)) for i, p in enumerate(prompts)]
            await until(lambda: spread(engine, 2))
            report = await engine.swap(str(served.second), Version(1), deadline_s=60)
            replies = await asyncio.gather(*calls)
            after = [await ask(engine, prompts[0], 8, rank=rank) for rank in (0, 1)]
        assert report.checksum
        for prompt, reply in zip(prompts, replies, strict=True):
            assert [span.version for span in reply.spans] == [0, 1]
            mark = len(prompt) + reply.spans[0].end - 1
            assert logprob_gap(reply, prompt, served.first, continued=(served.second, mark)) < EXACT
        for reply in after:
            assert reply.cached_tokens == 0
            assert logprob_gap(reply, prompts[0], served.second) < EXACT

    asyncio.run(check())


async def spread(engine: SGLangEngine, each: int) -> bool:
    return [load.running for load in await engine.loads(deadline_s=10)] == [each, each]
