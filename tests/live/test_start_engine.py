"""Starting the embedded engine through a host: what is proved, and what is said when it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.errors import UnavailableError
from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Engines
from agentrl.records import EngineInfo, Version
from agentrl.serve.launch import start_engine
from agentrl.serve.sglang import SGLangEngine
from tests.engines import ask, make_checkpoint, until

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("start"), 4, hidden_size=32, num_hidden_layers=2)


def start(run_dir: Path, model: Path | str, **recipe: Any) -> Any:
    (run_dir / "token").write_text("secret\n")
    return start_engine(
        LocalHost(),
        Engines(slots=2, kv_tokens=2048, **recipe),
        name="e1",
        model_path=str(model),
        version=Version(7),
        context_tokens=256,
        run_dir=str(run_dir),
        token_file=str(run_dir / "token"),
    )


def test_it_serves_the_version_that_was_asked_for_and_ends_on_request(checkpoint: Path, tmp_path: Path) -> None:
    async def check() -> None:
        engine, info, process = await start(tmp_path, checkpoint)
        try:
            assert isinstance(engine, SGLangEngine)
            assert isinstance(info, EngineInfo)
            assert (info.kind, info.version, info.ranks, info.slots) == ("embedded", 7, 1, 2)
            assert (await ask(engine, [1, 2, 3], 4)).spans[0].version == 7
            children = psutil.Process(process.pid).children(recursive=True)
            assert not any("secret" in argument for child in children for argument in child.cmdline())
        finally:
            await engine.aclose()
            await process.stop()
        assert await process.wait() == 0

    asyncio.run(check())


def test_sigterm_answers_those_who_still_wait(checkpoint: Path, tmp_path: Path) -> None:
    async def check() -> None:
        engine, _, process = await start(tmp_path, checkpoint)
        try:
            await engine.pause(deadline_s=10)
            held = asyncio.ensure_future(ask(engine, [1, 2, 3], 4))
            await until(lambda: _waits(engine))
            os.killpg(process.pid, signal.SIGTERM)
            assert (await held).finish == "length"
            assert await process.wait() == 0
        finally:
            await engine.aclose()
            await process.stop()

    asyncio.run(check())


def test_a_port_that_is_taken_is_named(checkpoint: Path, tmp_path: Path) -> None:
    async def check() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(UnavailableError, match="address already in use"):
                await start(tmp_path, checkpoint, base_port=port - 1, start_timeout_s=20)

    asyncio.run(check())


def test_a_missing_model_is_named_with_the_logs_tail(tmp_path: Path) -> None:
    async def check() -> None:
        with pytest.raises(UnavailableError, match=r"e1 did not start.*\n.*nowhere/config.json"):
            await start(tmp_path, tmp_path / "nowhere")

    asyncio.run(check())


async def _waits(engine: SGLangEngine) -> bool:
    return (await engine.loads(deadline_s=10))[0].waiting == 1
