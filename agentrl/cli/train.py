"""`agentrl train`: the trainer, in the foreground, against a running rollout."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agentrl.cli.common import Json, Quiet, RecipeFile, Set, console, emit
from agentrl.recipe.load import load

if TYPE_CHECKING:
    from agentrl.records import Version
    from agentrl.wiring.attach import LiveRun


def train(
    recipe: RecipeFile,
    attach: Annotated[
        str | None,
        typer.Option(help="The run: its folder, its URL, or HOST:FOLDER. Default: the newest of this recipe's name."),
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

    From another machine: --attach HOST:FOLDER over SSH, or --attach URL --token-file FILE; weights then go both ways
    through the run's HTTP face. Where the run's folder is on a file system that both see: --attach FOLDER --url URL.
    Ctrl-C leaves the run waiting; attach again to go on: checkpoints are in the run's folder, or in one of this
    machine's own below runs/.
    """
    from agentrl.wiring.reach import reached
    from agentrl.wiring.trainer import train_for

    loaded = load(recipe, overrides=set_ or [])
    steps: list[dict[str, Any]] = []

    def stepped(step: dict[str, Any]) -> None:
        steps.append(step)
        if not quiet:
            console.print(f"version [bold]{step['version']:>3}[/]  batch {step['batch']}  {step['seconds']:.2f} s")

    async def work() -> tuple[LiveRun, Version]:
        async with reached(attach, loaded.name, token_file=token_file, url=url) as run:
            if not quiet:
                console.print(f"[dim]training for[/] {run.folder}  [dim]log[/] {run.folder}/logs/trainer.log")
            return run, await train_for(run, loaded, stepped=stepped)

    run, version = asyncio.run(work())

    def draw(out: Console) -> None:
        out.print(f"[bold]done[/]: the run is over; {len(steps)} steps, version {version}")

    emit({"run": run.folder, "url": run.url, "version": version, "steps": steps}, draw, json=json, quiet=quiet)
