"""`agentrl train`: the trainer, in the foreground, against a running rollout."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from rich.console import Console

from agentrl.cli.common import Json, Quiet, RecipeFile, Set, console, emit
from agentrl.recipe.load import load


def train(
    recipe: RecipeFile,
    attach: Annotated[
        str | None, typer.Option(help="The run: its folder or its URL. Default: the newest run of this recipe's name.")
    ] = None,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train against a run that was started with --set train.embedded=false, until that run is over.

    Ctrl-C leaves the run waiting; attach again to go on: checkpoints are in the run's folder.
    """
    from agentrl.wiring.attach import find_run, newest_run
    from agentrl.wiring.trainer import train_for

    loaded = load(recipe, overrides=set_ or [])
    run = newest_run(loaded.name) if attach is None else find_run(attach)
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
