"""A version to engines that no live run looks after: those of `agentrl serve up`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from agentrl.errors import UnavailableError, UserError
from agentrl.hosts.inventory import connected
from agentrl.ports import Progress
from agentrl.publish.store import DiskWeightStore
from agentrl.publish.transfer import HostFolders
from agentrl.recipe.load import load
from agentrl.recipe.schema import Recipe
from agentrl.records import Record, Version
from agentrl.serve.launch import attach_engine
from agentrl.serve.sglang import SGLangEngine
from agentrl.wiring.derive import label_of
from agentrl.wiring.parts import folders_at, note
from agentrl.wiring.services import Services, Serving
from agentrl.wiring.survey import token_of_service


class Pushed(Record):
    """One engine's change. seconds of staging (it served on) and of the pause; both 0 where it held the version.
    checksum: of the weights it holds now; equal for engines of one kind; empty where it held the version."""

    engine: str
    before: Version
    version: Version
    stage_s: float = 0.0
    pause_s: float = 0.0
    checksum: str = ""


class Target(Record):
    """What is to be pushed where."""

    recipe: Recipe
    serving: Serving
    path: str
    version: Version


def complete(folder: Path, version: Version | None) -> Version:
    """The version, proved complete in the run's store; None: the newest. UserError where there is no such one."""
    store = DiskWeightStore(str(folder / "weights"))
    versions = store.versions()
    if version is None and versions:
        return versions[-1]
    if version is None or version not in versions:
        held = f"it holds {', '.join(map(str, versions))}" if versions else "it holds none"
        raise UserError(f"{folder / 'weights'}: no complete version {version}", hint=held)
    store.verify(version)
    return version


def target(folder: Path, version: Version | None) -> Target:
    """Blocking. UnavailableError where no engines of the run's recipe are up."""
    recipe = load(folder / "recipe.toml", checked=False)
    found = complete(folder, version)
    serving = Services("serve", recipe.name).running()
    if serving is None:
        raise UnavailableError(
            f"{folder}: the run is not live, and no engines of recipe {recipe.name} are up",
            hint="`agentrl serve up RECIPE` starts engines; `agentrl run` publishes by itself",
        )
    path = str(Path(DiskWeightStore(str(folder / "weights")).path(found)).absolute())
    return Target(recipe=recipe, serving=serving, path=path, version=found)


async def push(what: Target, *, heard: Callable[[Pushed], None], progress: Progress = note) -> list[Pushed]:
    """By the recipe's strategy: all stage at once while they serve, then at most `publish.max_unavailable` swap at a
    time, those with least work first; all at once under order "all". `heard` gets each as it is done,
    `progress` how far the version is on its way to a host.

    UserError where an engine holds a newer version: versions only grow.
    """
    async with _ways(what, progress) as folders:
        return await _to_all(what, folders, heard)


@contextlib.asynccontextmanager
async def _ways(what: Target, progress: Progress) -> AsyncIterator[dict[str, HostFolders]]:
    """How the version gets to the hosts of the service's engines, by host."""
    names = {part.host for part in what.serving.parts if part.host}
    if not names:
        yield {}
        return
    services = Path(what.serving.folder)
    recipe = await asyncio.to_thread(load, services / "serve.toml", checked=False)
    async with connected(recipe, services, label_of(f"{recipe.name}-serve", services), "engines") as sites:
        yield await folders_at(recipe, sites, sorted(names), str(Path(what.path).parent), progress)


async def _to_all(what: Target, folders: dict[str, HostFolders], heard: Callable[[Pushed], None]) -> list[Pushed]:
    section, admin_s = what.recipe.engines, what.recipe.engines.admin_timeout_s
    token = await asyncio.to_thread(token_of_service, what.serving)
    engines: list[tuple[SGLangEngine, Version]] = []
    try:
        for part in what.serving.parts:
            engine, info = await attach_engine(part.name, part.url, token, section, folders=folders.get(part.host))
            engines.append((engine, info.version))
        newer = [f"{engine.name} holds {version}" for engine, version in engines if version > what.version]
        if newer:
            raise UserError(
                f"version {what.version} is older than what serves ({', '.join(newer)})",
                hint="versions only grow; to go back: `agentrl serve down`, `agentrl serve up`, publish again",
            )
        return await _push(what, await _by_work(engines, admin_s), heard)
    finally:
        for engine, _ in engines:
            await engine.aclose()


async def _by_work(engines: list[tuple[SGLangEngine, Version]], admin_s: float) -> list[tuple[SGLangEngine, Version]]:
    work = {}
    for engine, _ in engines:
        loads = await engine.loads(deadline_s=admin_s)
        work[engine.name] = sum(load.running + load.waiting for load in loads)
    return sorted(engines, key=lambda pair: (work[pair[0].name], pair[0].name))


async def _push(
    what: Target, engines: list[tuple[SGLangEngine, Version]], heard: Callable[[Pushed], None]
) -> list[Pushed]:
    publish, admin_s = what.recipe.publish, what.recipe.engines.admin_timeout_s
    places = asyncio.Semaphore(len(engines) if publish.order == "all" else publish.max_unavailable)
    done: list[Pushed] = []

    async def one(engine: SGLangEngine, before: Version, staging: asyncio.Task[float] | None) -> None:
        said = Pushed(engine=engine.name, before=before, version=what.version)
        async with places:
            if staging is not None:
                stage_s = await staging
                report = await engine.swap(what.path, what.version, deadline_s=admin_s)
                said = msgspec.structs.replace(said, stage_s=stage_s, pause_s=report.pause_s, checksum=report.checksum)
        done.append(said)
        heard(said)

    async with asyncio.TaskGroup() as group:
        for engine, before in engines:
            staging = None
            if before < what.version:
                staging = group.create_task(engine.stage(what.path, what.version, deadline_s=admin_s))
            group.create_task(one(engine, before, staging))
    return done
