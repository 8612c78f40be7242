"""What a run's keepers start: engines and sandbox daemons of its own, on this machine or on the recipe's hosts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from agentrl import ports
from agentrl.errors import AgentRLError
from agentrl.hosts.inventory import Site, Sites, remove_dead
from agentrl.publish.transfer import HostFolders, folders_of
from agentrl.recipe.schema import Recipe, Sandbox
from agentrl.records import EngineInfo, Version
from agentrl.sandbox.client import SandboxClient
from agentrl.sandbox.launch import Paths, RunningDaemon, gc, start_daemon
from agentrl.serve.broadcast import Sender
from agentrl.serve.launch import attach_engine, start_engine
from agentrl.serve.sglang import SGLangEngine
from agentrl.wiring.preflight import require

log = logging.getLogger("agentrl.wiring")

_STILL_THERE_S = 10.0


def note(who: str, what: str, share: float | None = None) -> None:
    """A `ports.Progress` that goes to the log."""
    log.info("%s: %s%s", who, what, f", {share:.0%}" if share is not None else "")


async def prepare(
    recipe: Recipe,
    sites: Sites,
    *,
    token: str,
    store: str,
    roles: Collection[str] = ("engines", "sandbox"),
    progress: ports.Progress = note,
) -> dict[str, HostFolders]:
    """Hosts are examined and claimed for these roles, get the token, and it is found out how weights of the store in
    the folder `store` get to those with engines; by host name, without those that need nothing done. One error where a
    host cannot do its part."""
    if not recipe.hosts:
        return {}
    await require(recipe, sites, roles=roles)
    for site in sites.values():  # one after the other: of two runs that want the same hosts one gets them all
        await site.claim(roles)
    async with asyncio.TaskGroup() as group:
        for site in sites.values():
            group.create_task(site.host.write(site.token_file, token.encode()))
            group.create_task(site.host.write(Paths.below(site.run_dir).token, token.encode()))
            group.create_task(remove_dead(site.host))
    serving = [name for name in sites if name in recipe.engine_hosts and "engines" in roles]
    return await folders_at(recipe, sites, serving, store, progress)


async def folders_at(
    recipe: Recipe, sites: Sites, names: Iterable[str], store: str, progress: ports.Progress = note
) -> dict[str, HostFolders]:
    """How weights of the store get to these hosts, without those that need nothing done."""
    model = recipe.model.path
    near = model if model.startswith("/") else ""  # where the model may be there too
    found = {}
    for name in names:
        site = sites[name]
        assert site.spec is not None
        if not site.host.local or site.spec.weights == "copy":
            root = f"{site.run_dir}/weights"
            found[name] = await folders_of(
                site.host, site.spec.weights, store=store, root=root, near=near, progress=progress
            )
    return found


@dataclass
class OwnEngine:
    """A process of ours that serves. One that a lost link took from us lives on, and may be found again."""

    site: Site
    engine: SGLangEngine
    info: EngineInfo
    process: ports.Process
    served_name: str

    async def wait_ended(self) -> str:
        return f"its process ended with code {await self.process.wait()}"

    async def stop(self) -> None:
        await self.engine.aclose()
        if self.site.host.up:
            await self.process.stop()


@dataclass
class EngineStarter:
    """Starts engine `name` with the version that is served now, again and again. path: a version's folder here."""

    recipe: Recipe
    name: str
    site: Site
    label: str
    token: str
    folders: HostFolders | None
    version: Callable[[], Version]
    path: Callable[[Version], str]
    sender: Sender | None = None
    progress: ports.Progress = note
    _last: OwnEngine | None = field(default=None, init=False)

    async def start(self) -> OwnEngine:
        self._last = await self._found_again() or await self._anew()
        return self._last

    async def _anew(self) -> OwnEngine:
        recipe, site, version = self.recipe, self.site, self.version()
        engine, info, process = await start_engine(
            site.host,
            recipe.engines,
            name=self.name,
            model_path=await self._there(version),
            version=version,
            context_tokens=recipe.model.context_tokens,
            run_dir=site.run_dir,
            token_file=site.token_file,
            label=f"{self.label}.{self.name}",
            first_gpu=recipe.first_gpu(int(self.name[1:])) if recipe.engines.kind == "sglang" else 0,
            folders=self.folders,
            sender=self.sender,
            progress=self.progress,
        )
        server = await engine.server_info(deadline_s=recipe.engines.admin_timeout_s)
        return OwnEngine(site, engine, info, process, server.served_model_name or "")

    async def _there(self, version: Version) -> str:
        path = self.path(version)
        return path if self.folders is None else await self.folders.bring(path, version)

    async def _found_again(self) -> OwnEngine | None:
        """The process of before, if it is the one that answers: it serves on, with what it held."""
        last, self._last = self._last, None
        if last is None or self.site.link is None:
            return None
        try:
            async with asyncio.timeout(_STILL_THERE_S):
                engine, _ = await attach_engine(
                    self.name,
                    last.engine.url,
                    self.token,
                    self.recipe.engines,
                    folders=self.folders,
                    sender=self.sender,
                )
        except (AgentRLError, TimeoutError) as exc:
            log.info("%s on %s is not found again: %s", self.name, self.site.host.name, exc)
            return None
        try:
            server = await engine.server_info(deadline_s=_STILL_THERE_S)
            await engine.resume(deadline_s=_STILL_THERE_S)  # the link may have gone in the middle of a swap
            ready = await engine.ready(deadline_s=_STILL_THERE_S)
            info = await engine.info(deadline_s=_STILL_THERE_S)
        except BaseException as exc:
            await engine.aclose()
            if not isinstance(exc, AgentRLError):
                raise
            log.warning("%s on %s does not serve any more: %s", self.name, self.site.host.name, exc)
            return None
        if not ready or server.served_model_name != last.served_name:
            await engine.aclose()
            return None
        log.info("%s on %s is found again, with version %d", self.name, self.site.host.name, info.version)
        return OwnEngine(self.site, engine, info, last.process, last.served_name)


@dataclass
class OwnDaemon:
    """A sandbox daemon of ours. One that a lost link took from us is ended by its successor."""

    site: Site
    running: RunningDaemon

    @property
    def host(self) -> SandboxClient:
        return self.running.host

    @property
    def capacity(self) -> int:
        return self.running.capacity

    async def wait_ended(self) -> str:
        return await self.running.wait_ended()

    async def stop(self) -> None:
        if self.site.host.up:
            await self.running.stop()
        else:
            await self.running.host.aclose()


@dataclass
class DaemonStarter:
    recipe: Recipe
    site: Site
    label: str
    pooled: bool = False

    @property
    def section(self) -> Sandbox:
        """The recipe's, with what differs on this host."""
        spec, sandbox = self.site.spec, self.recipe.sandbox
        if spec is None or not spec.serving_cpus:
            return sandbox
        return msgspec.structs.replace(sandbox, serving_cpus=spec.serving_cpus)

    async def start(self) -> OwnDaemon:
        site = self.site
        running = await start_daemon(
            site.host,
            self.section,
            run_dir=site.run_dir,
            label=self.label,
            process=f"{self.label}.sandbox",
            pooled=self.pooled,
        )
        return OwnDaemon(site, running)

    async def collect(self) -> None:
        """A daemon that was killed has no successor at the end of a run."""
        try:
            await gc(self.section, run_dir=self.site.run_dir, label=self.label, host=self.site.host)
        except AgentRLError as exc:
            if self.site.link is None:
                raise
            log.warning("%s: sandboxes of %s may be left: %s", self.site.host.name, self.label, exc)
