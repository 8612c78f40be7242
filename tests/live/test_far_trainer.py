"""The real trainer process without the run's disk: weights both ways through the run's real face."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.publish.store import DiskWeightStore
from agentrl.recipe.schema import Train
from agentrl.records import StepReport, Version
from agentrl.train.config import WorkerConfig
from tests.faces import TOKEN, Gate, Line, served
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


async def over(process: asyncio.subprocess.Process, steps: asyncio.Task[list[StepReport]]) -> list[StepReport]:
    """Its reports, when both the run and the trainer have ended as they should."""
    async with asyncio.timeout(60):
        assert await process.wait() == 0
        return await steps


def weights(folder: Path, version: int) -> bytes:
    store = DiskWeightStore(str(folder / "weights"))
    store.verify(Version(version))
    return Path(store.path(Version(version)), "model.safetensors").read_bytes()


@pytest.mark.slow
def test_killed_between_save_and_hand_over(model: Path, tmp_path: Path) -> None:
    """The next process hands over what the first saved, and goes on, through a line that breaks again and again."""

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
            line = Line(face.url, 900_000)
            async with line.open() as url, trainer(tmp_path / "far", url) as process:
                await face.until(1)
                assert saved.stat().st_ino == made  # handed over, not trained again
                assert [report.batch for report in await over(process, steps)] == [0, 1, 2]
            assert line.cuts > 1
            assert face.store.versions() == [0, 1, 2, 3]

    asyncio.run(main())
    assert weights(tmp_path / "far", STEPS) == weights(tmp_path / "run", STEPS)
    assert sorted(p.name for p in (tmp_path / "far" / "weights").iterdir()) == ["v000002", "v000003"]  # the newest two
