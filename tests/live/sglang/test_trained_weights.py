"""Versions as our trainer and store write them, loaded by real SGLang while it serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.publish.store import DiskWeightStore
from agentrl.recipe.schema import Train
from agentrl.records import Version
from agentrl.serve.sglang import SGLangEngine
from agentrl.train.config import WorkerConfig
from agentrl.train.worker.session import Session
from tests.engines import Served, ask, client, logprob_gap, prompt_of, serve_sglang, until
from tests.live.sglang.marks import needs_sglang
from tests.toy_policy import make_batch

pytestmark = needs_sglang

TINY = Path(__file__).parents[3] / "agentrl" / "models" / "tiny"
EXACT = 1e-4  # float32, hundreds of tokens; a mark that is off by one token is off by more than 0.1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DiskWeightStore:
    """Version 0 is the policy that ships with agentrl, 1 and 2 are steps away from it, long enough to be seen."""
    run = tmp_path_factory.mktemp("run")
    config = WorkerConfig(
        url="",
        token_file="",
        model=str(TINY),
        weights=str(run / "weights"),
        checkpoints=str(run / "checkpoints"),
        train=Train(lr=3e-3, ratio_low=0.999, ratio_high=1e9),
    )
    made = DiskWeightStore(config.weights)
    with closing(Session(config, made)) as session:
        for version in (0, 1):
            session.train("lease", make_batch(id=version, version=version), threading.Event())
    return made


@pytest.fixture(scope="module")
def served(store: DiskWeightStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    first, second = (Path(store.path(Version(v))) for v in (0, 1))
    with serve_sglang(tmp_path_factory.mktemp("sglang"), first, second) as running:
        yield running


async def publish(engine: SGLangEngine, store: DiskWeightStore, version: int) -> str:
    folder = store.path(Version(version))
    await engine.stage(folder, Version(version), deadline_s=60)
    return (await engine.swap(folder, Version(version), deadline_s=60)).checksum


def test_each_trained_version_is_served_as_a_plain_forward_pass_computes_it(
    served: Served, store: DiskWeightStore
) -> None:
    async def check() -> None:
        prompt = prompt_of(50, seed=1)
        async with client(served) as engine:
            seen = []
            for version in (0, 1, 2, 0):
                checksum = await publish(engine, store, version) if version or seen else ""
                reply = await ask(engine, prompt, 24)
                assert [span.version for span in reply.spans] == [version]
                assert logprob_gap(reply, prompt, Path(store.path(Version(version)))) < EXACT
                others = {0, 1, 2} - {version}
                assert all(logprob_gap(reply, prompt, Path(store.path(Version(v)))) > 1e-3 for v in others)
                seen.append(checksum)
            assert len(set(seen)) == 4  # "" of the start, and one each

    asyncio.run(check())


def test_a_trained_version_arrives_under_running_requests(served: Served, store: DiskWeightStore) -> None:
    async def check() -> None:
        prompts = [prompt_of(n, seed=n) for n in (30, 60, 90)]
        async with client(served) as engine, asyncio.TaskGroup() as group:
            await publish(engine, store, 0)
            calls = [group.create_task(ask(engine, prompt, 400)) for prompt in prompts]
            await until(lambda: running(engine, 3))
            await publish(engine, store, 1)
            replies = await asyncio.gather(*calls)
        folders = [Path(store.path(Version(v))) for v in (0, 1)]
        for prompt, reply in zip(prompts, replies, strict=True):
            assert [span.version for span in reply.spans] == [0, 1]
            mark = len(prompt) + reply.spans[0].end - 1
            assert logprob_gap(reply, prompt, folders[0], continued=(folders[1], mark)) < EXACT

    asyncio.run(check())


async def running(engine: SGLangEngine, wanted: int) -> bool:
    return sum(load.running for load in await engine.loads(deadline_s=10)) == wanted
