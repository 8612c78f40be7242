"""agentrl onto the hosts of a recipe, and what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import agentrl
from agentrl.errors import AgentRLError, UserError
from agentrl.hosts import install, wheels
from agentrl.hosts.install import Installed as Installed
from agentrl.hosts.inventory import LOCAL, open_host
from agentrl.hosts.survey import survey
from agentrl.ports import Progress
from agentrl.recipe.schema import HostSpec, Recipe
from agentrl.records import Record
from agentrl.wiring.preflight import ask_of

if TYPE_CHECKING:
    from agentrl.hosts.ssh import SshHost

_CACHE = "~/.cache/agentrl/wheels"


class HostState(Record):
    """What one host has. fault: why it could not be asked; then the rest is empty. free: bytes on the disk of its home.
    current: whether its agentrl is of the version that runs here."""

    name: str
    target: str = ""
    fault: str = ""
    hint: str = ""
    exit_code: int = 0
    home: str = ""
    interpreter: str = ""
    python: str = ""
    agentrl: str = ""
    current: bool = False
    started: tuple[str, ...] = ()
    free: int = 0


async def status(recipe: Recipe) -> list[HostState]:
    """Of all hosts, all at once; none is changed."""
    return list(await asyncio.gather(*(_state(recipe, spec) for spec in _listed(recipe))))


async def install_all(
    recipe: Recipe, *, given: Path | None, there: bool, progress: Progress
) -> list[Installed | HostState]:
    """Onto all hosts at once; one that fails does not stop the others and is answered as a HostState with its fault.

    given: a folder with all wheels; None: they are built and downloaded here. there: only ours is sent, each host takes
    the others from its own package index.
    """
    building = asyncio.Lock()  # hosts of one kind share what is downloaded

    async def one(spec: HostSpec) -> Installed | HostState:
        try:
            return await _install(recipe, spec, given, there, building, progress)
        except AgentRLError as exc:
            return HostState(name=spec.name, fault=str(exc), hint=exc.hint, exit_code=exc.exit_code)

    return list(await asyncio.gather(*(one(spec) for spec in _listed(recipe))))


def extras_of(recipe: Recipe, spec: HostSpec) -> list[str]:
    """What agentrl needs there beyond its core."""
    engines, sandbox = "engines" in spec.roles, "sandbox" in spec.roles
    wanted = {
        "local": engines and recipe.engines.kind == "embedded",
        "docker": sandbox and recipe.sandbox.backend == "docker",
        "bubblewrap": sandbox and recipe.sandbox.backend == "bubblewrap",
    }
    return [name for name, needed in wanted.items() if needed]


async def _install(
    recipe: Recipe, spec: HostSpec, given: Path | None, there: bool, building: asyncio.Lock, progress: Progress
) -> Installed:
    if spec.python:
        raise UserError(
            f"host {spec.name}: hosts.python names an interpreter of its own, {spec.python}, which is left alone",
            hint="leave the key out, or install agentrl there yourself: `pip install agentrl`",
        )
    progress(spec.name, "connecting")
    host = await _open(spec)
    try:
        extras, base = extras_of(recipe, spec), host.base_python
        target = await install.target(host, base)
        progress(spec.name, "wheels")
        async with building:
            found = await asyncio.to_thread(_gather, given, there, extras, target)
        return await install.install(host, base, found, extras, progress, index=there)
    finally:
        await host.aclose()


def _gather(given: Path | None, there: bool, extras: Sequence[str], target: wheels.Target) -> list[Path]:
    if given is not None:
        return wheels.in_folder(given)
    cache = Path(_CACHE).expanduser()
    own = wheels.own(cache)
    return [own] if there else wheels.everything(cache, own, extras, target)


async def _state(recipe: Recipe, spec: HostSpec) -> HostState:
    try:
        host = await _open(spec)
        try:
            facts, _ = await survey(host, ask_of(recipe, spec, host))
        finally:
            await host.aclose()
    except AgentRLError as exc:
        return HostState(name=spec.name, fault=str(exc), hint=exc.hint, exit_code=exc.exit_code)
    return HostState(
        name=spec.name,
        target=host.ssh_target,
        home=host.home,
        interpreter=facts.python.path,
        python=facts.python.version,
        agentrl=facts.python.agentrl,
        current=facts.python.agentrl == agentrl.__version__,
        started=tuple(f"{each.run} ({each.role})" for each in facts.started),
        free=facts.disk.free,
    )


async def _open(spec: HostSpec) -> SshHost:
    host = await open_host(spec)  # says what to do where asyncssh, an extra, is missing
    from agentrl.hosts.ssh import SshHost

    assert isinstance(host, SshHost), "_listed leaves out this machine"
    return host


def _listed(recipe: Recipe) -> Sequence[HostSpec]:
    found = [spec for spec in recipe.hosts if spec.address != LOCAL]
    if not found:
        raise UserError(f"recipe {recipe.name} lists no hosts", hint="add [[hosts]] with a name to it")
    return found
