"""A sandbox daemon or a backend without a run around it, for benches."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Recipe
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.backends.measure import Figures, measure
from agentrl.sandbox.client import SandboxClient
from agentrl.sandbox.launch import start_daemon


@contextlib.asynccontextmanager
async def lone_daemon(recipe: Recipe, folder: Path) -> AsyncIterator[SandboxClient]:
    """The recipe's daemon; `folder` takes its state and its log. Stopped on exit with all its sandboxes."""
    running = await start_daemon(LocalHost(), recipe.sandbox, run_dir=str(folder), label=folder.name)
    try:
        yield running.host
    finally:
        await running.stop()


async def measure_backend(recipe: Recipe, folder: Path, *, repeats: int, many: int) -> Figures:
    """Of the recipe's backend alone, in this process. UnavailableError where it cannot work here."""
    backend = make_backend(recipe.sandbox, state_dir=str(folder))
    try:
        await backend.probe()
        return await measure(backend, repeats=repeats, many=many)
    finally:
        await backend.aclose()
