"""One engine without a run around it, for benches and for a look at a model."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from agentrl import ports
from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Recipe
from agentrl.records import EngineInfo, Version
from agentrl.serve.launch import start_engine
from agentrl.wiring.derive import model_path


@dataclass(frozen=True)
class LoneEngine:
    engine: ports.Engine
    info: EngineInfo
    process: ports.Process


@contextlib.asynccontextmanager
async def lone_engine(recipe: Recipe, folder: Path) -> AsyncIterator[LoneEngine]:
    """The recipe's engine with its initial policy as version 0; `folder` takes its log and token. Stopped on exit."""
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    engine, info, process = await start_engine(
        LocalHost(),
        recipe.engines,
        name="e0",
        model_path=str(model_path(recipe)),
        version=Version(0),
        context_tokens=recipe.model.context_tokens,
        run_dir=str(folder),
        token_file=str(token_file),
    )
    try:
        yield LoneEngine(engine, info, process)
    finally:
        await engine.aclose()
        await process.stop()
