"""The real trainer process without the run's disk: weights both ways through the run's real face."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.publish.store import DiskWeightStore
from agentrl.recipe.schema import Train
from agentrl.records import StepReport, Version, WeightsManifest
from agentrl.train.config import WorkerConfig
from tests.faces import TOKEN, Line, Served, served
from tests.toy_policy import make_model

pytestmark = pytest.mark.live

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "moe_intermediate_size": 48}
    return make_model(tmp_path_factory.mktemp("policy"), head_dim=16, **sizes)


@contextlib.asynccontextmanager
async def trainer(home: Path, url: str, **changes: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """With a folder of its own; killed at the end if it is still there."""
    argv = [sys.executable, "-m", "agentrl.train.worker", "--config-file", config(home, url, **changes)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE, env=env)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def config(home: Path, url: str, *, lr: float = 3e-4, lease_s: float = 30.0) -> str:
    home.mkdir(exist_ok=True)
    (home / "token").write_text(TOKEN)
    told = WorkerConfig(
        url=url,
        token_file=str(home / "token"),
        model="",
        weights=str(home / "weights"),
        checkpoints=str(home / "checkpoints"),
        train=Train(micro_tokens=64, lr=lr),
        lease_s=lease_s,
        wait_s=1.0,
        remote=True,
        name=home.name,
    )
    (home / "trainer.json").write_bytes(msgspec.json.encode(told))
    return str(home / "trainer.json")


class Gate:
    """In front of the run's inbox: an offer waits there while it is shut."""

    def __init__(self, face: Served) -> None:
        self._offer = face.inbox.offer
        self.came = asyncio.Event()
        self.open = asyncio.Event()
        face.inbox.offer = self._pass  # type: ignore[method-assign]

    async def _pass(self, manifest: WeightsManifest) -> dict[str, int]:
        self.came.set()
        await self.open.wait()
        return await self._offer(manifest)


async def over(process: asyncio.subprocess.Process, steps: asyncio.Task[list[StepReport]]) -> list[StepReport]:
    """Its reports, when both the run and the trainer have ended as they should."""
    async with asyncio.timeout(60):
        assert await process.wait() == 0
        return await steps


def weights(folder: Path, version: int) -> bytes:
    store = DiskWeightStore(str(folder / "weights"))
    store.verify(Version(version))
    return Path(store.path(Version(version)), "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Through a line that breaks again and again."""
    place = tmp_path_factory.mktemp("undisturbed")

    async def main() -> None:
        async with served(place / "run", model) as face:
            steps = asyncio.ensure_future(face.steps(STEPS))
            line = Line(face.url, 900_000)
            async with line.open() as url, trainer(place / "far", url) as process:
                assert [report.version for report in await over(process, steps)] == [1, 2, 3]
            assert line.cuts > 1

    asyncio.run(main())
    assert weights(place / "far", STEPS) == weights(place / "run", STEPS)
    assert sorted(p.name for p in (place / "far" / "weights").iterdir()) == ["v000002", "v000003"]  # the newest two
    return weights(place / "run", STEPS)


def test_killed_between_save_and_hand_over(model: Path, undisturbed: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path / "run", model) as face:
            steps = asyncio.ensure_future(face.steps(STEPS))
            gate = Gate(face)
            async with trainer(tmp_path / "far", face.url) as process:
                await asyncio.wait_for(gate.came.wait(), 60)
                process.kill()
                await process.wait()
            saved = tmp_path / "far" / "weights" / "v000001" / "model.safetensors"
            made = saved.stat().st_ino
            gate.open.set()
            async with trainer(tmp_path / "far", face.url) as process:
                await face.until(1)
                assert saved.stat().st_ino == made  # handed over, not trained again
                assert [report.batch for report in await over(process, steps)] == [0, 1, 2]
            assert face.store.versions() == [0, 1, 2, 3]

    asyncio.run(main())
    assert weights(tmp_path / "run", STEPS) == undisturbed


def test_a_step_that_another_took_meanwhile_is_given_up(model: Path, tmp_path: Path) -> None:
    """The first stands still with its version 1 made; the second makes another. The first goes on from that one."""

    async def main() -> None:
        async with served(tmp_path / "run", model) as face:
            steps = asyncio.ensure_future(face.steps(STEPS))
            gate = Gate(face)
            async with trainer(tmp_path / "first", face.url, lease_s=0.5) as first:
                await asyncio.wait_for(gate.came.wait(), 60)
                first.send_signal(signal.SIGSTOP)
                made = weights(tmp_path / "first", 1)
                gate.open.set()
                async with trainer(tmp_path / "second", face.url, lr=1e-2, lease_s=0.5) as second:
                    await face.until(1)
                    second.kill()
                    await second.wait()
                first.send_signal(signal.SIGCONT)
                await over(first, steps)
            assert made != weights(tmp_path / "run", 1) == weights(tmp_path / "second", 1)

    asyncio.run(main())
    assert weights(tmp_path / "first", STEPS) == weights(tmp_path / "run", STEPS)
