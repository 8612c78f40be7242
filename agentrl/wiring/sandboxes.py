"""Sandboxes by hand: one command in a fresh one, and the removal of what dead daemons left."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import UnavailableError
from agentrl.recipe.schema import Recipe
from agentrl.records import ExecResult, Task, TaskId
from agentrl.sandbox import launch
from agentrl.wiring.attach import RUNS
from agentrl.wiring.services import Services
from agentrl.wiring.survey import client_of


async def exec_once(recipe: Recipe, command: Sequence[str], *, timeout_s: float, trusted: bool) -> ExecResult:
    """At the daemon that `agentrl sandbox up` started. One word is a shell line, several are an argument list.

    UnavailableError where no daemon runs.
    """
    serving = Services("sandbox", recipe.name).running()
    if serving is None:
        raise UnavailableError(f"no sandbox daemon of recipe {recipe.name} runs", hint="start it: `agentrl sandbox up`")
    line = command[0] if len(command) == 1 else shlex.join(command)
    task = Task(id=TaskId("exec"), kind="exec", instruction="", root="", trusted=trusted)
    client = client_of(serving)
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
    """How many sandboxes were removed. Asks no daemon: what a living one owns is told apart by its owner."""
    folders = await asyncio.to_thread(lambda: sorted({*runs.glob("*/sandbox"), *runs.glob(".services/*/sandbox")}))
    with tempfile.TemporaryDirectory(prefix="agentrl-gc-") as scratch:
        return sum(
            [await launch.gc(recipe.sandbox, run_dir=str(folder)) for folder in (*(f.parent for f in folders), scratch)]
        )
