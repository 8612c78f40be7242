"""Sandboxes by hand: one command in a fresh one, and the removal of what dead daemons left."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import UnavailableError, UserError
from agentrl.hosts.inventory import Site, connected, remove_dead
from agentrl.recipe.schema import Recipe
from agentrl.records import ExecResult, Task, TaskId
from agentrl.sandbox import launch
from agentrl.wiring.attach import RUNS
from agentrl.wiring.services import Services
from agentrl.wiring.survey import client_of

_DEAD_AFTER_S = 60.0


async def exec_once(
    recipe: Recipe, command: Sequence[str], *, timeout_s: float, trusted: bool, host: str = ""
) -> ExecResult:
    """At a daemon that `agentrl sandbox up` started (host: that one's; empty: the first). One word is a shell line,
    several are an argument list.

    UnavailableError where no daemon runs, UserError where none is on that host.
    """
    serving = Services("sandbox", recipe.name).running()
    if serving is None:
        raise UnavailableError(f"no sandbox daemon of recipe {recipe.name} runs", hint="start it: `agentrl sandbox up`")
    line = command[0] if len(command) == 1 else shlex.join(command)
    task = Task(id=TaskId("exec"), kind="exec", instruction="", root="", trusted=trusted)
    names = [part.name for part in serving.parts]
    if host and host not in names:
        raise UserError(f"--host {host}: no daemon there", hint=f"there is one on {', '.join(names)}")
    client = client_of(serving, serving.parts[names.index(host) if host else 0])
    try:
        box = await client.open(
            task, label=f"{recipe.name}-exec", lease_s=timeout_s + recipe.sandbox.lease_s, request_id=uuid.uuid4().hex
        )
        try:
            return await box.exec(line, timeout_s=timeout_s, request_id=uuid.uuid4().hex)
        finally:
            await box.close()
    finally:
        await client.aclose()


async def collect_garbage(recipe: Recipe, *, runs: Path = RUNS) -> int:
    """How many sandboxes were removed, here or on the recipe's hosts. Asks no daemon: what a living one owns is told
    apart by its owner. Folders of dead runs on the hosts go too."""
    if recipe.hosts:
        async with connected(recipe, runs, "gc") as sites:
            return sum(await asyncio.gather(*(_collect(recipe, site) for site in sites.values())))
    folders = await asyncio.to_thread(lambda: sorted({*runs.glob("*/sandbox"), *runs.glob(".services/*/sandbox")}))
    with tempfile.TemporaryDirectory(prefix="agentrl-gc-") as scratch:
        return sum(
            [await launch.gc(recipe.sandbox, run_dir=str(folder)) for folder in (*(f.parent for f in folders), scratch)]
        )


async def _collect(recipe: Recipe, site: Site) -> int:
    """Its site is a scratch folder."""
    assert site.spec is not None
    removed = 0
    if "sandbox" in site.spec.roles:
        removed = await launch.gc(recipe.sandbox, run_dir=site.run_dir, host=site.host)
        await site.clear(Path())
    await remove_dead(site.host, age_s=_DEAD_AFTER_S)
    return removed
