"""Engines and a sandbox daemon that a run uses and does not own: somebody else started them and stops them."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UnavailableError, UserError
from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Engines, Recipe, Sandbox
from agentrl.records import EngineInfo, Version
from agentrl.sandbox import launch
from agentrl.sandbox.client import SandboxClient
from agentrl.serve.launch import attach_engine
from agentrl.serve.sglang import SGLangEngine

_ASK_AGAIN_S = 1.0


@dataclass
class BorrowedEngine:
    engine: SGLangEngine
    info: EngineInfo

    async def wait_ended(self) -> str:
        """Never by itself: we hear nothing of its process. Its keeper asks it."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        await self.engine.aclose()


@dataclass
class BorrowedDaemon:
    host: SandboxClient
    capacity: int

    async def wait_ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        await self.host.aclose()


def token_of(engines: Engines) -> str:
    """Blocking. UserError where the file cannot be read."""
    if not engines.token_file:
        return ""
    try:
        return Path(engines.token_file).read_text().strip()
    except OSError as exc:
        raise UserError(
            f"engines.token_file: {engines.token_file}: {exc.strerror}", hint="name the engines' token file"
        ) from exc


async def borrow_engine(
    recipe: Recipe, name: str, url: str, token: str, *, path: str, version: Version, patience_s: float
) -> BorrowedEngine:
    """An engine that serves `version` from `path`. It may hold anything before, another run's version of the same
    number included, so it is always loaded anew, and its cached histories are ours alone.

    patience_s: how long one that is away is waited for. UnavailableError after that, UserError where it cannot serve
    this recipe.
    """
    section, ends = recipe.engines, time.monotonic() + patience_s
    while True:
        try:
            engine, info = await attach_engine(name, url, token, section, namespace=f"{uuid.uuid4().hex[:8]}/")
            break
        except UnavailableError:
            if time.monotonic() > ends:
                raise
            await asyncio.sleep(_ASK_AGAIN_S)
    try:
        if info.context_tokens < recipe.model.context_tokens:
            raise UserError(
                f"engines.attach: {url} serves contexts of {info.context_tokens} tokens, the recipe wants"
                f" {recipe.model.context_tokens}",
                hint="lower model.context_tokens, or start the engine with more",
            )
        await engine.stage(path, version, deadline_s=section.admin_timeout_s)
        await engine.swap(path, version, deadline_s=section.admin_timeout_s)
        return BorrowedEngine(engine, await engine.info(deadline_s=section.admin_timeout_s))
    except BaseException:
        await engine.aclose()
        raise


async def borrow_daemon(sandbox: Sandbox) -> BorrowedDaemon:
    """The daemon whose folder `sandbox.attach` names. UnavailableError where none serves there."""
    client = await launch.attach(LocalHost(), run_dir=sandbox.attach)
    return BorrowedDaemon(client, sandbox.max_live)
