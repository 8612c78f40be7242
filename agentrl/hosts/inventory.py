"""The recipe's hosts as `ports.Host`s, each with a folder there that one run, or one service, has for itself.

    HOST.home/runs/LABEL-HOST/   token  logs/  weights/  sandbox/: gone when the run is over; logs are fetched first

The folder names the host: homes may be on one shared disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import AgentRLError, UnavailableError, UserError
from agentrl.hosts.claim import claim
from agentrl.hosts.local import LocalHost
from agentrl.ports import Host, Process
from agentrl.recipe.schema import HostSpec, Recipe

log = logging.getLogger("agentrl.hosts")

LOCAL = "local"
_COMMAND_S = 30.0
_REMOVE_S = 120.0
_DEAD_AFTER_S = 600.0
_LOG_BYTES = 1 << 20
_LIST = 'cd "$1/logs" 2>/dev/null && ls -1 -- *.log 2>/dev/null; true'


@dataclass(frozen=True)
class Site:
    """One run's part of a host. run_dir: a folder there that is its alone. spec: None for this machine where the recipe
    lists no hosts; then run_dir is the run's own folder. claims: processes that hold its roles there."""

    host: Host
    run_dir: str
    spec: HostSpec | None = None
    claims: list[Process] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As the recipe has it; empty where it lists no hosts."""
        return self.spec.name if self.spec else ""

    @property
    def link(self) -> Host | None:
        """For whoever watches whether the host is there; None: it cannot be lost without us."""
        return None if self.host.local else self.host

    @property
    def token_file(self) -> str:
        return f"{self.run_dir}/token"

    async def claim(self, roles: Collection[str]) -> None:
        """What it starts there is nobody else's until `clear`. UnavailableError where it is."""
        mine = [role for role in self.spec.roles if role in roles] if self.spec else []
        if mine and self.link is not None:
            self.claims.append(await claim(self.host, self.run_dir, mine))

    async def fetch_logs(self, into: Path) -> None:
        """The end of each log there, as `into/NAME.log`."""
        _, names = await self.host.run(["sh", "-c", _LIST, "sh", self.run_dir], timeout_s=_COMMAND_S)
        for name in names.split():
            argv = ["tail", "-c", str(_LOG_BYTES), "--", f"{self.run_dir}/logs/{name}"]
            code, text = await self.host.run(argv, timeout_s=_COMMAND_S)
            if code == 0:
                await asyncio.to_thread(_write, into / Path(name).name, text)

    async def clear(self, logs: Path) -> None:
        """After all that ran in it has ended: its logs come here, everything else goes."""
        if self.spec is None:
            return
        for claimed in self.claims:
            await claimed.stop()
        await self.fetch_logs(logs / self.host.name)
        runs = self.run_dir.rpartition("/")[0]
        remove = 'rm -rf -- "$1" && rmdir -- "$2" 2>/dev/null; [ ! -e "$1" ]'
        code, said = await self.host.run(["sh", "-c", remove, "sh", self.run_dir, runs], timeout_s=_COMMAND_S)
        if code:
            log.warning("%s: %s is not removed: %s", self.host.name, self.run_dir, said.strip())


Sites = Mapping[str, Site]


@contextlib.asynccontextmanager
async def connected(recipe: Recipe, folder: Path, label: str, role: str = "") -> AsyncIterator[Sites]:
    """Every host of the recipe (with this role) by its name; without any, this machine under the empty name.

    Raises one error that names the first host that cannot be used. What runs there is not this function's to end.
    """
    if not recipe.hosts:
        yield {"": Site(LocalHost(), str(folder))}
        return
    async with contextlib.AsyncExitStack() as stack:
        specs = [spec for spec in recipe.hosts if not role or role in spec.roles]
        opening = [asyncio.ensure_future(open_host(spec)) for spec in specs]
        hosts = await asyncio.gather(*opening, return_exceptions=True)
        for host in hosts:
            if not isinstance(host, BaseException):
                stack.push_async_callback(host.aclose)
        for host in hosts:
            if isinstance(host, BaseException):
                raise host
        yield {
            spec.name: Site(host, f"{host.home}/runs/{label}-{spec.name}", spec)
            for spec, host in zip(specs, hosts, strict=True)
            if not isinstance(host, BaseException)
        }


async def clear(sites: Sites, logs: Path) -> None:
    """All sites of a run that is over. A host that is out of reach is named: what ran there ends with its lease."""

    async def one(site: Site) -> None:
        try:
            if not site.host.up:
                raise AgentRLError("it is out of reach")
            await site.clear(logs)
        except (AgentRLError, OSError) as exc:
            left = f"{site.host.name}: {site.run_dir} is left there: {exc}"
            log.warning("%s; processes end with their lease, `agentrl sandbox gc RECIPE` removes the rest", left)

    await asyncio.gather(*(one(site) for site in sites.values()))


async def remove_dead(host: Host, *, age_s: float = _DEAD_AFTER_S) -> None:
    """Folders of runs that nobody looks after any more: they were out of reach when their run ended."""
    argv = [host.python, "-m", "agentrl.hosts.leftovers", f"{host.home}/runs", str(age_s)]
    code, said = await host.run(argv, timeout_s=_REMOVE_S)
    if code:
        raise UnavailableError(f"{host.name}: folders of dead runs cannot be removed: {said.strip()[-500:]}")


async def open_host(spec: HostSpec) -> Host:
    """One error that says what stands in the way. The caller closes it."""
    if spec.address == LOCAL:
        return _local(spec)
    try:
        from agentrl.hosts.ssh import SshHost  # asyncssh is an extra
    except ImportError as exc:
        raise UserError(f"hosts.{spec.name}: SSH needs asyncssh", hint="pip install 'agentrl[hosts]'") from exc
    host = SshHost(
        spec.name,
        address=spec.address,
        user=spec.user,
        port=spec.port,
        python=spec.python,
        home=spec.home,
        lease_s=spec.lease_s,
    )
    try:
        return await host.open()
    except BaseException:
        await host.aclose()
        raise


def _local(spec: HostSpec) -> LocalHost:
    home, python = (str(Path(path).expanduser()) if path else "" for path in (spec.home, spec.python))
    return LocalHost(spec.name, python=python or sys.executable, home=home)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
