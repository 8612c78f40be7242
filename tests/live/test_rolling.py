"""Rolling publication on two real engines under load: while one takes new weights the other's tokens keep coming."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.records import Reply, Version
from agentrl.serve.sglang import SGLangEngine
from tests.engines import Served, ask, client, make_checkpoint, prompt_of, serve, until

pytestmark = pytest.mark.live

STREAMS = 4  # generations on each engine, of more tokens than the swaps can last
TOKENS = 1_800


def test_while_one_engine_swaps_the_other_produces(tmp_path: Path) -> None:
    first, second = make_checkpoint(tmp_path / "first", 1), make_checkpoint(tmp_path / "second", 2)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        serve("embedded", tmp_path / "a", first, second) as left,
        serve("embedded", tmp_path / "b", first, second) as right,
    ):
        replies = asyncio.run(publish(left, right, second))
    for reply in replies:  # nobody was stopped: every generation went on over the swap, its tokens marked
        assert (reply.finish, len(reply.tokens)) == ("length", TOKENS)
        assert [span.version for span in reply.spans] == [0, 1]


async def publish(left: Served, right: Served, weights: Path) -> list[Reply]:
    async with client(left) as one, client(right) as two, asyncio.TaskGroup() as group:
        calls = [
            group.create_task(ask(engine, prompt_of(40, seed=n), TOKENS))
            for engine in (one, two)
            for n in range(STREAMS)
        ]
        await until(lambda: _all_run(one, two))
        for swapping, serving in ((one, two), (two, one)):
            await swapping.stage(str(weights), Version(1), deadline_s=30)
            before = await serving.generated_tokens(deadline_s=10)
            report = await swapping.swap(str(weights), Version(1), deadline_s=30)
            meanwhile = await serving.generated_tokens(deadline_s=10) - before
            print(f"\n{swapping.url}: paused {report.pause_s * 1e3:.1f} ms, the other sampled {meanwhile} tokens")
            assert meanwhile > 0
            assert report.lost_tokens == 0
        return [await call for call in calls]


async def _all_run(*engines: SGLangEngine) -> bool:
    loads = [await engine.loads(deadline_s=10) for engine in engines]
    return all(sum(load.running for load in of_one) == STREAMS for of_one in loads)
