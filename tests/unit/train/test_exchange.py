"""Two trainers far from the run: what one made while the other had its place counts for nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.publish.store import DiskWeightStore
from agentrl.recipe.schema import Train
from agentrl.records import Version
from agentrl.train.client import RunClient
from agentrl.train.config import WorkerConfig
from agentrl.train.worker.exchange import RemoteExchange
from agentrl.train.worker.main import Trainer
from tests.faces import TOKEN, Gate, served
from tests.toy_policy import make_model


class Silent(RunClient):
    """Its renewals do not arrive."""

    async def renew(self, lease: str, *, lease_s: float) -> None:
        await asyncio.Event().wait()


async def work(client: RunClient, home: Path, url: str, lr: float) -> None:
    config = WorkerConfig(
        url=url,
        token_file="",
        model="",
        weights=str(home / "weights"),
        checkpoints=str(home / "checkpoints"),
        train=Train(micro_tokens=64, lr=lr),
        lease_s=0.2,
        wait_s=1.0,
        remote=True,
        name=home.name,
    )
    async with client:
        store = DiskWeightStore(config.weights)
        await Trainer(config, client, RemoteExchange(config, client, store)).serve(store)


def weights(home: Path, version: int) -> bytes:
    store = DiskWeightStore(str(home / "weights"))
    return Path(store.path(Version(version)), "model.safetensors").read_bytes()


def test_a_step_that_another_took_meanwhile_is_given_up(tmp_path: Path) -> None:
    """The first stands still with its version 1 made; the second makes another. The first goes on from that one."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "moe_intermediate_size": 48}
    model = make_model(tmp_path / "model", head_dim=16, **sizes)
    first, second = tmp_path / "first", tmp_path / "second"

    async def main() -> None:
        async with asyncio.timeout(60), served(tmp_path / "run", model) as face:
            steps = asyncio.ensure_future(face.steps(3))
            gate = Gate(face)
            standing = asyncio.ensure_future(work(Silent(face.url, TOKEN, trainer="first"), first, face.url, 3e-4))
            await gate.came.wait()
            made = weights(first, 1)
            rival = asyncio.ensure_future(work(RunClient(face.url, TOKEN, trainer="second"), second, face.url, 1e-2))
            await face.until(1)
            rival.cancel()
            await asyncio.gather(rival, return_exceptions=True)
            gate.open.set()
            await standing
            assert [report.version for report in await steps] == [1, 2, 3]
            assert made != weights(tmp_path / "run", 1) == weights(second, 1)

    asyncio.run(main())
    assert weights(first, 3) == weights(tmp_path / "run", 3)
