"""`agentrl replay`: the journal through a fresh core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentrl.cli.common import FAILED, Json, Quiet, RunFolder, emit, escape

if TYPE_CHECKING:
    from agentrl.wiring.replay import Replay


def replay(
    run: RunFolder,
    laws: Annotated[bool, typer.Option("--laws", help="Check every law after every event as well.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Feed a run's journal to a fresh scheduler; exit 0 only where it gives the same commands.

    Otherwise the first event that led to other commands is named, and the exit code is 1.
    """
    from agentrl.wiring.replay import replay as replayed

    found = replayed(run, laws=laws)
    emit(found, lambda out: _draw(out, found), json=json, quiet=quiet)
    if not found.identical:
        raise typer.Exit(FAILED)


def _draw(out: Console, found: Replay) -> None:
    head = f"{found.events} events of {found.processes} process(es), {found.steps} steps"
    if found.difference is not None:
        at = found.difference
        out.print(f"[bold red]differs[/] at event {at.seq} ({at.now_s:.3f} s): {escape(str(at.event))}", soft_wrap=True)
        out.print(f"  journalled commands {at.expected}, this scheduler gives {at.actual}:")
        for command in at.commands:
            out.print(f"    {escape(str(command))}", soft_wrap=True)
    elif found.broken is not None:
        at_law = found.broken
        out.print(f"[bold red]broken[/] after event {at_law.seq} ({at_law.now_s:.3f} s): {escape(at_law.what)}")
    else:
        checked = ", every law holds after each" if found.laws_checked else ""
        out.print(f"[bold green]identical[/]: {head}{checked}")
