"""Starts the trainer process of a run on this machine. It is ready at its first claim."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec

from agentrl.ports import Host, Process
from agentrl.recipe.schema import Recipe
from agentrl.train.config import WorkerConfig


async def start_trainer(
    host: Host, recipe: Recipe, *, run_dir: str, url: str, token_file: str, model_path: str, remote: bool = False
) -> Process:
    """The started process; whoever called stops it. Its log is `logs/trainer.log` of the run's folder.

    remote: `run_dir` is a folder of the trainer's own, and weights go to the run through its face.
    """
    config = worker_config(recipe, run_dir=run_dir, url=url, token_file=token_file, model_path=model_path)
    if remote:
        config = msgspec.structs.replace(config, remote=True, name=f"trainer@{socket.gethostname()}")
    file = write_config(config, run_dir)
    argv = [sys.executable, "-m", "agentrl.train.worker", "--config-file", file]
    return await host.start(argv, log=f"{run_dir}/logs/trainer.log", env=environment(recipe), label="trainer")


def worker_config(recipe: Recipe, *, run_dir: str, url: str, token_file: str, model_path: str) -> WorkerConfig:
    run = Path(run_dir).resolve()
    return WorkerConfig(
        url=url,
        token_file=str(Path(token_file).resolve()),
        model=str(Path(model_path).resolve()) if model_path else "",
        weights=str(run / "weights"),
        checkpoints=str(run / "checkpoints"),
        train=recipe.train,
        temperature=recipe.rollout.temperature,
        seed=recipe.seed,
    )


def write_config(config: WorkerConfig, run_dir: str) -> str:
    """Path of a file that only its owner can read: it says where the token is."""
    path = Path(run_dir).resolve() / "trainer.json"
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(config)))
    return str(path)


def environment(recipe: Recipe) -> dict[str, str]:
    """Thread pools of the native libraries are sized at import, before torch can be told."""
    return {"OMP_NUM_THREADS": str(recipe.train.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
