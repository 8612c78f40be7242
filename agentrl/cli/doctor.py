"""`agentrl doctor`: whether this machine, and the hosts of the recipe, can run it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from agentrl.cli.common import UNAVAILABLE, USER, Json, Quiet, RecipeFile, Set, emit, escape
from agentrl.recipe.load import load

if TYPE_CHECKING:
    from agentrl.wiring.findings import Finding

_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


def doctor(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Preflight in seconds, nothing left behind: libraries, model, sandboxes, disk, CPUs, ports, GPUs.

    Where the recipe has hosts, each of them is asked as well, all at once. Exit 2 where the recipe or a file it names
    is wrong, 3 where a machine lacks something.
    """
    from agentrl.wiring.doctor import examine

    findings = asyncio.run(examine(load(recipe, overrides=set_ or [], checked=False)))
    failed = [finding for finding in findings if finding.state == "fail"]
    emit({"ok": not failed, "checks": findings}, lambda out: _draw(out, findings), json=json, quiet=quiet)
    if failed:
        raise typer.Exit(USER if any(finding.users for finding in failed) else UNAVAILABLE)


def _draw(out: Console, findings: list[Finding]) -> None:
    host = ""
    for finding in findings:
        if finding.host != host:
            host = finding.host
            out.print(f"[bold]{host}[/]")
        out.print(f"{_MARKS[finding.state]} {finding.name:<9} {escape(finding.detail)}", soft_wrap=True)
        if finding.remedy:
            out.print(f"               [dim]{escape(finding.remedy)}[/]", soft_wrap=True)
