"""The real trainer process against a face over real HTTP: three steps, and what kills at the worst moments change."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.hosts.local import LocalHost
from agentrl.publish.store import DiskWeightStore
from agentrl.recipe.schema import Recipe, Train
from agentrl.records import Version
from agentrl.train.config import WorkerConfig
from agentrl.train.launch import start_trainer
from tests.toy_policy import Face, make_batch, make_model

pytestmark = pytest.mark.live

STEPS = 3
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy"), **SMALL)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = tmp_path_factory.mktemp("undisturbed")

    async def main() -> None:
        face = new_face()
        async with face.serve() as url, trainer(run, model, url) as process:
            assert await asyncio.wait_for(process.wait(), 60) == 0
        assert [r.version for r in face.reports] == [1, 2, 3]
        assert face.reports[0].metrics["trainable_tokens"] > 0

    asyncio.run(main())
    return final_weights(run)


def new_face(**changes: Any) -> Face:
    return Face(STEPS, lambda v: make_batch(id=v, version=v, groups=2, siblings=8, **changes))


def final_weights(run: Path) -> bytes:
    store = DiskWeightStore(str(run / "weights"))
    store.verify(Version(STEPS))
    return Path(store.path(Version(STEPS)), "model.safetensors").read_bytes()


@contextlib.asynccontextmanager
async def trainer(run: Path, model: Path, url: str, **changes: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Started with its lifeline on our pipe; killed at the end if it is still there."""
    (run / "token").write_text("secret\n")
    fields: dict[str, Any] = {
        "url": url,
        "token_file": str(run / "token"),
        "model": str(model),
        "weights": str(run / "weights"),
        "checkpoints": str(run / "checkpoints"),
        "train": Train(micro_tokens=64),
        "wait_s": 1.0,
    }
    (run / "trainer.json").write_bytes(msgspec.json.encode(WorkerConfig(**fields | changes)))
    argv = [sys.executable, "-m", "agentrl.train.worker", "--config-file", str(run / "trainer.json")]
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    assert await process.wait() == -signal.SIGKILL


def files(folder: Path) -> Sequence[str]:
    return sorted(p.name for p in folder.iterdir())


def test_killed_in_the_middle_of_a_step(model: Path, undisturbed: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        face = new_face()
        async with face.serve() as url:
            async with trainer(tmp_path, model, url, lease_s=0.01) as process:
                await face.until(lambda: face.version == 1 and face.renewals > 0)
                seen = face.renewals, len(face.claims)
                # a renewal after a further claim: a step is in progress
                await face.until(lambda: len(face.claims) > seen[1] and face.renewals > seen[0])
                await kill(process)
            async with trainer(tmp_path, model, url) as process:
                assert await asyncio.wait_for(process.wait(), 60) == 0
        assert [r.batch for r in face.reports] == [0, 1, 2]

    asyncio.run(main())
    assert final_weights(tmp_path) == undisturbed
    assert files(tmp_path / "weights") == ["v000000", "v000001", "v000002", "v000003"]


def test_killed_between_save_and_acknowledgement(model: Path, undisturbed: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        face = new_face()
        face.hold_ack = True
        async with face.serve() as url:
            async with trainer(tmp_path, model, url) as process:
                await face.until(lambda: face.acks_seen > 0)
                await kill(process)
            saved = tmp_path / "weights" / "v000001" / "model.safetensors"
            first = saved.stat().st_ino
            face.hold_ack = False
            async with trainer(tmp_path, model, url) as process:
                assert await asyncio.wait_for(process.wait(), 60) == 0
            assert saved.stat().st_ino == first  # acknowledged, not trained again
        assert [r.batch for r in face.reports] == [0, 1, 2]

    asyncio.run(main())
    assert final_weights(tmp_path) == undisturbed


@pytest.mark.slow
def test_acknowledges_the_known_batch_where_its_lease_ran_out(model: Path, undisturbed: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        face = new_face()
        face.hold_ack = True
        async with face.serve() as url:
            async with trainer(tmp_path, model, url) as process:
                await face.until(lambda: face.acks_seen > 0)
                await kill(process)
            face.hold_ack = False
            face.expire()
            async with trainer(tmp_path, model, url) as process:
                assert await asyncio.wait_for(process.wait(), 60) == 0
        # came back with version 1, learned that 0 is expected, got batch 0 and answered for it
        assert [c.version for c in face.claims][1:4] == [1, 0, 1]
        assert [r.batch for r in face.reports] == [0, 1, 2]

    asyncio.run(main())
    assert final_weights(tmp_path) == undisturbed


@pytest.mark.slow  # chosen moments are in `make test`
def test_killed_at_random_moments(model: Path, undisturbed: bytes, tmp_path: Path) -> None:
    """Kills, each a little later after a claim than the one before."""

    async def main() -> None:
        face = new_face()
        async with face.serve() as url:
            for attempt in range(5):
                async with trainer(tmp_path, model, url) as process:
                    begun = len(face.claims)
                    await face.until(lambda n=begun: len(face.claims) > n)  # type: ignore[misc]
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), 0.05 * attempt)
                        break
                    process.kill()
                    if await process.wait() == 0:
                        break  # it was over just before
            else:
                async with trainer(tmp_path, model, url) as process:
                    assert await asyncio.wait_for(process.wait(), 60) == 0
        assert [r.batch for r in face.reports] == [0, 1, 2]

    asyncio.run(main())
    assert final_weights(tmp_path) == undisturbed


def test_a_lost_lease_abandons_the_step_and_the_next_claim_goes_on(
    model: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    async def main() -> None:
        face = new_face()
        async with face.serve() as url, trainer(tmp_path, model, url, lease_s=0.01) as process:
            await face.until(lambda: face.renewals > 0)
            face.expire()
            assert await asyncio.wait_for(process.wait(), 60) == 0
        assert [r.batch for r in face.reports] == [0, 1, 2]

    asyncio.run(main())
    assert final_weights(tmp_path) == undisturbed


@pytest.mark.parametrize("way", ["lifeline", "SIGTERM"])
def test_ends_when_it_is_told_to(model: Path, tmp_path: Path, way: str) -> None:
    async def main() -> None:
        face = new_face()
        face.idle = True
        async with face.serve() as url, trainer(tmp_path, model, url) as process:
            await face.until(lambda: bool(face.claims))
            if way == "lifeline":
                assert process.stdin is not None
                process.stdin.close()
            else:
                process.terminate()
            assert await asyncio.wait_for(process.wait(), 10) == 130

    asyncio.run(main())


def test_a_step_that_does_not_end_is_an_error(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        face = new_face(lengths=(900, 1000))
        train = Train(step_timeout_s=0.01)
        async with face.serve() as url, trainer(tmp_path, model, url, train=train) as process:
            _, said = await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == 1
            assert b"did not end within" in said
            assert b"Traceback" not in said

    asyncio.run(main())


def test_launched_as_a_run_launches_it(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        recipe = Recipe(name="test", train=Train(lr=1e-4))
        token = tmp_path / "token"
        token.write_text("secret")
        face = new_face()
        async with face.serve() as url:
            process = await start_trainer(
                LocalHost(), recipe, run_dir=str(tmp_path), url=url, token_file=str(token), model_path=str(model)
            )
            try:
                assert await asyncio.wait_for(process.wait(), 60) == 0
            finally:
                await process.stop(grace_s=0.1)
        assert [r.metrics["lr"] for r in face.reports] == [1e-4] * 3
        assert (tmp_path / "trainer.json").stat().st_mode & 0o777 == 0o600
        assert "version 3: batch 2" in (tmp_path / "logs" / "trainer.log").read_text()

    asyncio.run(main())
