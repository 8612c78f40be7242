"""Engines and a sandbox daemon that a run uses and does not own: somebody else started them and stops them."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UnavailableError, UserError
from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Engines, Recipe, Sandbox
from agentrl.records import EngineInfo, Version
from agentrl.sandbox import launch
from agentrl.sandbox.client import DaemonUnreachable, SandboxClient
from agentrl.serve.launch import attach_engine
from agentrl.serve.sglang import SGLangEngine
from agentrl.serve.staging import Folders
from agentrl.wiring.services import Part, Services, Serving
from agentrl.wiring.survey import client_of

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


def hosts_attached(recipe: Recipe) -> dict[str, str]:
    """URL to host, of engines that `agentrl serve up` started on the recipe's hosts: their token lies in the service's
    folder. Blocking."""
    serving = None
    if recipe.hosts and recipe.engines.attach and recipe.engines.token_file:
        serving = _service_at("serve", Path(recipe.engines.token_file).absolute().parent)
    parts = serving.parts if serving is not None else ()
    return {part.url: part.host for part in parts if part.host and part.url in recipe.engines.attach}


async def borrow_engine(
    recipe: Recipe,
    name: str,
    url: str,
    token: str,
    *,
    path: str,
    version: Version,
    patience_s: float,
    folders: Folders | None = None,
) -> BorrowedEngine:
    """An engine that serves `version` from `path`. It may hold anything before, another run's version of the same
    number included, so it is always loaded anew, and its cached histories are ours alone.

    patience_s: how long one that is away is waited for. folders: how weights get to its host. UnavailableError after
    that, UserError where it cannot serve this recipe.
    """
    section, ends = recipe.engines, time.monotonic() + patience_s
    while True:
        try:
            namespace = f"{uuid.uuid4().hex[:8]}/"
            engine, info = await attach_engine(name, url, token, section, namespace=namespace, folders=folders)
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


def daemons_attached(sandbox: Sandbox) -> dict[str, Callable[[], Awaitable[BorrowedDaemon]]]:
    """How to borrow each daemon below the folder `sandbox.attach`: one for each host of `agentrl sandbox up`. Blocking.
    What is returned raises UnavailableError where none serves."""
    serving = _service_at("sandbox", Path(sandbox.attach).absolute())
    if serving is None or not any(part.host for part in serving.parts):
        return {"local": lambda: _attached(sandbox)}
    return {part.name: functools.partial(_part, serving, part, sandbox) for part in serving.parts}


def _service_at(kind: str, folder: Path) -> Serving | None:
    return Services(kind, folder.name, runs=folder.parent.parent).running()


async def _part(serving: Serving, part: Part, sandbox: Sandbox) -> BorrowedDaemon:
    return await _answering(client_of(serving, part), sandbox)


async def _attached(sandbox: Sandbox) -> BorrowedDaemon:
    return await _answering(await launch.attach(LocalHost(), run_dir=sandbox.attach), sandbox)


async def _answering(client: SandboxClient, sandbox: Sandbox) -> BorrowedDaemon:
    """One that is away is waited for as long as a daemon may take to start."""
    ends = time.monotonic() + sandbox.start_timeout_s
    while True:
        try:
            await client.status(deadline_s=sandbox.start_timeout_s)
            return BorrowedDaemon(client, sandbox.max_live)
        except BaseException as exc:
            if not isinstance(exc, DaemonUnreachable) or time.monotonic() > ends:
                await client.aclose()
                raise
        await asyncio.sleep(_ASK_AGAIN_S)
