"""`agentrl hosts install|status`: agentrl on the machines of a recipe."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import agentrl
from agentrl.cli.common import Json, Quiet, RecipeFile, Set, console, emit, escape, table
from agentrl.cli.progress import progress
from agentrl.errors import UserError
from agentrl.recipe.load import load

if TYPE_CHECKING:
    from agentrl.wiring.installing import HostState, Installed

app = typer.Typer(help="agentrl on the machines of a recipe.", no_args_is_help=True)

Wheels = Annotated[
    Path | None, typer.Option(help="A folder that holds all wheels; else they are built and downloaded here.")
]
There = Annotated[bool, typer.Option("--there", help="Send agentrl alone; hosts take the rest from their own index.")]


@app.command()
def install(
    recipe: RecipeFile,
    wheels: Wheels = None,
    there: There = False,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put this version of agentrl onto every host of the recipe: below its home, without root, with no network there.

    Only wheels that are missing are sent. Given again it changes nothing where nothing has changed.
    """
    from agentrl.wiring.installing import HostState, install_all

    if wheels is not None and there:
        raise UserError("--wheels and --there exclude each other", hint="leave one out")
    if wheels is not None and not wheels.is_dir():
        raise UserError(f"--wheels {wheels}: no such folder", hint="`pip download -d DIR agentrl` fills one")
    loaded = load(recipe, overrides=set_ or [], checked=False)
    with progress(quiet=quiet or json) as lines:
        done = asyncio.run(install_all(loaded, given=wheels, there=there, progress=lines))
    failed = [each for each in done if isinstance(each, HostState)]
    installed = [each for each in done if not isinstance(each, HostState)]
    emit({"installed": installed, "failed": failed}, lambda out: _draw(out, installed), json=json, quiet=quiet)
    _fail(failed)


@app.command()
def status(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """What every host of the recipe has: interpreter, agentrl, what runs there. Exit 3 where one cannot be asked."""
    from agentrl.wiring.installing import status as ask

    states = asyncio.run(ask(load(recipe, overrides=set_ or [], checked=False)))
    emit({"version": agentrl.__version__, "hosts": states}, lambda out: _table(out, states), json=json, quiet=quiet)
    _fail([state for state in states if state.fault])


def _draw(out: Console, installed: list[Installed]) -> None:
    for each in installed:
        what = f"{each.sent} wheels sent" if each.changed else "nothing to do"
        out.print(f"{escape(each.host)}: agentrl {each.version} in {escape(each.python)} ({what})", soft_wrap=True)


def _table(out: Console, states: list[HostState]) -> None:
    drawn = table("hosts", "name", "ssh", "python", "agentrl", "runs there", ">free")
    for state in states:
        if not state.fault:
            ours = "" if state.current else f" (here {agentrl.__version__})"
            free = f"{state.free / 2**30:.0f} GiB"
            version = f"{state.agentrl or '-'}{ours}"
            python = f"{state.python or '-'} {state.interpreter}"
            drawn.add_row(state.name, state.target, python, version, ", ".join(state.started) or "-", free)
    out.print(drawn)


def _fail(states: list[HostState]) -> None:
    """Each fault with its remedy; the exit code is that of the first."""
    for state in states:
        console.print(f"[bold red]error:[/] {escape(state.fault)}", soft_wrap=True)
        if state.hint:
            console.print(f"  [dim]{escape(state.hint)}[/]", soft_wrap=True)
    if states:
        raise typer.Exit(states[0].exit_code)
