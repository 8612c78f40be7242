"""Weights into real SGLang by broadcast: two ranks, gloo, requests in flight; the same as from the disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.errors import EngineTorn
from agentrl.records import Version
from agentrl.serve.broadcast import Broadcast
from agentrl.serve.sglang import SGLangEngine
from agentrl.train.sender import SenderProcess
from tests.engines import TOKEN, Served, ask, logprob_gap, make_checkpoint, prompt_of, serve_sglang, until
from tests.live.sglang.marks import needs_sglang, two_ranks

pytestmark = [*needs_sglang, pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a core for each rank")]

EXACT = 1e-4  # float32, hundreds of tokens; a mark that is off by one token is off by more than 0.1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("broadcast")
    first, second = make_checkpoint(folder / "first", 1), make_checkpoint(folder / "second", 2)
    with serve_sglang(folder, first, second, **two_ranks(slots=4)) as running:
        yield running


@asynccontextmanager
async def broadcast_to(served: Served, log: Path) -> AsyncIterator[tuple[SGLangEngine, SenderProcess]]:
    sender = SenderProcess(address="127.0.0.1", backend="gloo", log=log)
    engine = SGLangEngine("e0", served.url, TOKEN, broadcast=Broadcast(sender))
    try:
        await engine.info(deadline_s=10)
        yield engine, sender
    finally:
        await engine.aclose()
        await sender.aclose()


def test_it_is_what_the_disk_would_have_given_and_comes_under_running_requests(served: Served, tmp_path: Path) -> None:
    async def check() -> None:
        prompts = [prompt_of(40 + n, seed=n) for n in range(4)]
        disk = SGLangEngine("e0", served.url, TOKEN)
        async with broadcast_to(served, tmp_path / "log") as (engine, _), asyncio.TaskGroup() as group:
            from_disk = await disk.swap(str(served.second), Version(1), deadline_s=60)
            await disk.swap(str(served.first), Version(2), deadline_s=60)
            await engine.info(deadline_s=10)
            stage_s = await engine.stage(str(served.second), Version(3), deadline_s=60)
            calls = [group.create_task(ask(engine, p, 80, rank=i % 2)) for i, p in enumerate(prompts)]
            await until(lambda: spread(engine, 2))
            report = await engine.swap(str(served.second), Version(3), deadline_s=60)
            replies = await asyncio.gather(*calls)
            after = [await ask(engine, prompts[0], 8, rank=rank, temperature=1e-6) for rank in (0, 1)]
            print(f"group in {stage_s:.2f} s, paused {report.pause_s:.3f} s; disk {from_disk.pause_s:.3f} s")
        await disk.aclose()
        assert report.checksum == from_disk.checksum != ""
        for prompt, reply in zip(prompts, replies, strict=True):
            assert [span.version for span in reply.spans] == [2, 3]
            mark = len(prompt) + reply.spans[0].end - 1
            assert logprob_gap(reply, prompt, served.first, continued=(served.second, mark)) < EXACT
        assert after[0].tokens == after[1].tokens  # the greedy probe, on either rank
        assert all(reply.cached_tokens == 0 for reply in after)

    asyncio.run(check())


def test_a_sender_that_dies_tears_the_engine_which_then_samples_nothing(served: Served, tmp_path: Path) -> None:
    async def check() -> None:
        async with broadcast_to(served, tmp_path / "log") as (engine, sender):
            await engine.stage(str(served.first), Version(4), deadline_s=60)
            await kill(sender)
            with pytest.raises(EngineTorn, match="version 4 arrived in part"):
                await engine.swap(str(served.first), Version(4), deadline_s=30)
            assert not await engine.ready(deadline_s=10)

    asyncio.run(check())


async def kill(sender: SenderProcess) -> None:
    process = sender._process
    assert process is not None
    process.kill()
    await process.wait()


async def spread(engine: SGLangEngine, each: int) -> bool:
    return [load.running for load in await engine.loads(deadline_s=10)] == [each, each]
