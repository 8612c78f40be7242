"""`agentrl bench`: measured figures of one part on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentrl.cli.common import Quiet, Set, console, out, table
from agentrl.recipe.load import load
from agentrl.recipe.schema import Recipe


class Name(StrEnum):
    ENGINE = "engine"
    SANDBOX = "sandbox"


def bench(
    name: Annotated[Name, typer.Argument(help="What to measure.", show_default=False)],
    recipe: Annotated[Path | None, typer.Argument(help="Default: the part's own defaults.", show_default=False)] = None,
    set_: Set = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures there; - for stdout.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; engines take the best.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Start the part, measure it, stop it; prints a table. Seconds to a minute.

    Say beside a figure what else the machine was doing: the load before is among the figures.
    """
    loaded = load(recipe, overrides=set_ or []) if recipe is not None else None
    if not quiet:
        console.print(f"[dim]measuring {name}[/]")
    figures = _measure(name, loaded, repeats)
    text = _text(figures)
    if json is not None and str(json) != "-":
        json.write_text(text)
    if str(json) == "-":
        typer.echo(text, nl=False)
    elif not quiet:
        {Name.ENGINE: _draw_engine, Name.SANDBOX: _draw_sandbox}[name](out, figures)


def _measure(name: Name, recipe: Recipe | None, repeats: int) -> dict[str, Any]:
    if name is Name.ENGINE:
        from agentrl.bench import engine

        return engine.main(recipe, repeats=repeats or 3, quiet=True)
    from agentrl.bench import sandbox

    return sandbox.main(recipe, repeats=repeats or 20)


def _text(figures: dict[str, Any]) -> str:
    import json

    return json.dumps(figures, indent=2) + "\n"


def _draw_engine(to: Console, figures: dict[str, Any]) -> None:
    from agentrl.bench import engine

    to.print(engine.table(figures), markup=False, highlight=False)


def _draw_sandbox(to: Console, figures: dict[str, Any]) -> None:
    backend, daemon = figures["backend"], figures["daemon"]
    to.print(f"{backend['backend']}: {backend['isolation']}")
    made = table("", "ms", ">median", ">p90", ">best")
    rows = [(name, backend[name]) for name in ("start", "exec", "exec_program", "put", "reset", "kill")]
    rows += [(f"daemon {name}", daemon[name]) for name in ("open", "exec", "put", "close")]
    for name, latency in rows:
        made.add_row(name, *(f"{latency[key]:.1f}" for key in ("median", "p90", "best")))
    to.print(made)
    to.print(
        f"{backend['many']} sandboxes: {backend['many_exec_per_s']:.0f} commands/s,"
        f" {backend['pss_mb_per_box']:.2f} MB each, all killed in {backend['many_kill_s']:.2f} s;"
        f" through the daemon, {daemon['callers']} callers: {daemon['execs_per_s']:.0f} commands/s"
    )
    to.print(f"[dim]{figures['cpus']} CPUs, load before {figures['busy_before']:.1f}[/]")
