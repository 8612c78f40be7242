"""`agentrl train`: the trainer, in the foreground, against a running rollout."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from agentrl.cli.common import Json, Quiet, RecipeFile, Set, console, emit
from agentrl.errors import UserError
from agentrl.recipe.load import load

if TYPE_CHECKING:
    from agentrl.wiring.attach import LiveRun


def train(
    recipe: RecipeFile,
    attach: Annotated[
        str | None, typer.Option(help="The run: its folder or its URL. Default: the newest run of this recipe's name.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A copy of the run's file `token`, where its folder is on another machine.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Where the run is reached from here, if its folder is shared, its host another.")
    ] = None,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train against a run that was started with --set train.embedded=false, until that run is over.

    From another machine: --attach URL --token-file FILE; weights then go both ways through the run's HTTP face. Where
    the run's folder is on a file system that both see: --attach FOLDER --url URL.
    Ctrl-C leaves the run waiting; attach again to go on: checkpoints are in the run's folder, or in one of this
    machine's own below runs/.
    """
    from agentrl.wiring.trainer import train_for

    loaded = load(recipe, overrides=set_ or [])
    run = _run(attach, token_file, loaded.name)
    if url is not None:
        run = msgspec.structs.replace(run, url=url.rstrip("/"))
    steps: list[dict[str, Any]] = []

    def stepped(step: dict[str, Any]) -> None:
        steps.append(step)
        if not quiet:
            console.print(f"version [bold]{step['version']:>3}[/]  batch {step['batch']}  {step['seconds']:.2f} s")

    if not quiet:
        console.print(f"[dim]training for[/] {run.folder}  [dim]log[/] {run.folder}/logs/trainer.log")
    version = asyncio.run(train_for(run, loaded, stepped=stepped))

    def draw(out: Console) -> None:
        out.print(f"[bold]done[/]: the run is over; {len(steps)} steps, version {version}")

    emit({"run": run.folder, "url": run.url, "version": version, "steps": steps}, draw, json=json, quiet=quiet)


def _run(attach: str | None, token_file: Path | None, name: str) -> LiveRun:
    from agentrl.wiring.attach import find_run, is_url, newest_run, remote_run

    if token_file is None:
        return newest_run(name) if attach is None else find_run(attach)
    if attach is None or not is_url(attach):
        raise UserError("--token-file goes with --attach URL", hint="a run's folder holds its token already")
    return remote_run(attach, token_file, name)
