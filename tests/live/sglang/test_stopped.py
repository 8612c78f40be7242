"""A scheduler that stands still while SGLang's HTTP process answers: what it says of itself gives it away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.runtime.stuck import Stuck
from agentrl.serve.sglang import SGLangEngine
from tests.engines import Served, ask, client, make_checkpoint, prompt_of, serve_sglang, until
from tests.live.sglang.marks import needs_sglang

pytestmark = needs_sglang

STUCK_S = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    first = make_checkpoint(folder / "first", 1)
    with serve_sglang(folder, first, first) as running:
        yield running


def scheduler(folder: Path) -> psutil.Process:
    [found] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0].startswith("sglang::scheduler")
        and any(str(folder) in " ".join(parent.cmdline()) for parent in process.parents())
    ]
    return found


def test_a_stopped_scheduler_is_found_stuck_and_an_idle_one_is_not(served: Served, folder: Path) -> None:
    async def check() -> None:
        async with client(served) as engine:
            assert await look(engine, Stuck(stuck_s=STUCK_S), for_s=2 * STUCK_S) == ""  # idle
            call = asyncio.create_task(ask(engine, prompt_of(20, seed=1), 120))
            await until(lambda: running(engine))
            process = scheduler(folder)
            process.suspend()
            try:
                assert await engine.ready(deadline_s=10)
                assert "requests run, no token" in await look(engine, Stuck(stuck_s=STUCK_S), for_s=6 * STUCK_S)
            finally:
                process.resume()
            assert len((await call).tokens) == 120

    asyncio.run(check())


async def look(engine: SGLangEngine, watch: Stuck, *, for_s: float) -> str:
    """Ask as the keeper does, until there is a reason."""
    why, end = "", time.monotonic() + for_s
    while not why and time.monotonic() < end:
        loads, ready = await engine.loads(deadline_s=5), await engine.ready(deadline_s=5)
        tokens = await engine.generated_tokens(deadline_s=5)
        why = watch.look(time.monotonic(), ready=ready, loads=loads, tokens=tokens)
        await asyncio.sleep(0.5)
    return why


async def running(engine: SGLangEngine) -> bool:
    return (await engine.loads(deadline_s=10))[0].running == 1
