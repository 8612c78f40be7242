"""`agentrl serve up|status|down`: engines that live on after the command."""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentrl.cli.common import UNAVAILABLE, Json, Quiet, RecipeFile, Set, console, emit, table
from agentrl.cli.progress import progress
from agentrl.recipe.load import load

if TYPE_CHECKING:
    from agentrl.wiring.commands import Command
    from agentrl.wiring.services import Serving
    from agentrl.wiring.survey import EngineReport

app = typer.Typer(
    help="The recipe's engines, on this machine or its hosts, running on after the command.", no_args_is_help=True
)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the exact commands; start nothing, write nothing.")]


@app.command()
def up(recipe: RecipeFile, dry_run: DryRun = False, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Start the engines and return once each has proved that it serves."""
    from agentrl.wiring.commands import engine_commands
    from agentrl.wiring.services import Services

    loaded = load(recipe, overrides=set_ or [])
    services = Services("serve", loaded.name)
    if dry_run:
        commands = engine_commands(loaded, services.folder)
        emit(commands, lambda out: _draw_commands(out, commands), json=json, quiet=quiet)
        return
    if not quiet:
        console.print(f"[dim]starting {loaded.engines.count} engines; log[/] {services.log}")
    with progress(quiet=quiet or json) as told:
        serving = services.up(loaded, timeout_s=loaded.engines.start_timeout_s, progress=told)
    emit(serving, lambda out: _draw_up(out, serving, str(recipe)), json=json, quiet=quiet)


@app.command()
def status(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Ask each engine who it is, what it holds and how busy it is. Exit 3 where one does not serve."""
    from agentrl.wiring import survey
    from agentrl.wiring.services import Services

    loaded = load(recipe, overrides=set_ or [])
    serving = Services("serve", loaded.name).running()
    if serving is None:
        emit(
            {"serving": None, "engines": []},
            lambda out: out.print(f"no engines of recipe {loaded.name} run; `agentrl serve up {recipe}` starts them"),
            json=json,
            quiet=quiet,
        )
        raise typer.Exit(UNAVAILABLE)
    reports = asyncio.run(survey.engines(serving, loaded.engines))
    emit({"serving": serving, "engines": reports}, lambda out: _draw_status(out, reports), json=json, quiet=quiet)
    if not all(report.serves for report in reports):
        raise typer.Exit(UNAVAILABLE)


@app.command()
def down(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Stop the engines with all they started. Nothing is left but their logs."""
    from agentrl.wiring.services import Services

    loaded = load(recipe, overrides=set_ or [])
    services = Services("serve", loaded.name)
    stopped = services.down()
    said = "stopped" if stopped else "none ran"
    emit(
        {"recipe": loaded.name, "stopped": stopped},
        lambda out: out.print(f"engines of recipe {loaded.name}: {said}"),
        json=json,
        quiet=quiet,
    )


def how_to_use(serving: Serving, recipe: str) -> str:
    """The command that runs a recipe on engines that are up."""
    urls = ", ".join(f'"{part.url}"' for part in serving.parts)
    attach = shlex.quote(f"engines.attach=[{urls}]")
    return f"agentrl run {recipe} --set {attach} --set {shlex.quote(f'engines.token_file={serving.token_file}')}"


def _draw_commands(out: Console, commands: list[Command]) -> None:
    for command in commands:
        out.print(f"[dim]# {command.name} on {command.host}[/]")
        out.print(command.line, soft_wrap=True, markup=False)


def _draw_up(out: Console, serving: Serving, recipe: str) -> None:
    made = table("", "engine", "host", "url", ">process", "log")
    for part in serving.parts:
        made.add_row(part.name, part.host or "here", part.url, str(part.pid), part.log)
    out.print(made)
    out.print("[dim]use them:[/] ", end="")
    out.print(how_to_use(serving, recipe), soft_wrap=True, markup=False)
    out.print(f"[dim]stop them:[/] agentrl serve down {recipe}")


def _draw_status(out: Console, reports: list[EngineReport]) -> None:
    made = table("", "engine", "host", "state", ">version", ">running", ">waiting", ">slots", ">KV used", "url")
    for said in reports:
        if said.serves:
            used = f"{said.kv_used_tokens:,} of {said.kv_total_tokens:,}"
            state, figures = "[green]serves[/]", (said.version, said.running, said.waiting, said.slots, used)
            made.add_row(said.name, said.host or "here", state, *map(str, figures), said.url)
        else:
            made.add_row(said.name, said.host or "here", "[red]down[/]", *[""] * 5, said.url)
    out.print(made)
    for said in reports:
        if not said.serves:
            out.print(
                f"[red]{said.name}[/]: {said.detail or 'it answers, but is not ready'}; see {said.log}{_on(said.host)}"
            )


def _on(host: str) -> str:
    return f" on {host}" if host else ""
