"""`agentrl run` and `agentrl rollout`: the whole loop, or batches at fixed weights."""

from __future__ import annotations

import asyncio
import logging
import signal
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.common import INTERRUPTED, Json, Quiet, RecipeFile, Set, console, print_json
from agentrl.cli.progress import Lines, progress
from agentrl.recipe.load import load
from agentrl.recipe.schema import Recipe

if TYPE_CHECKING:
    from agentrl.wiring import Run

RunDir = Annotated[
    Path | None, typer.Option(help="The run's folder; one that holds a run is resumed. Default: runs/NAME-TIME.")
]

_EXIT = {"done": 0, "drained": INTERRUPTED, "failed": 1, "no-progress": 4}


def run(
    recipe: RecipeFile,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: the recipe's.")] = None,
    run_dir: RunDir = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the recipe's.")] = None,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole loop: engines, sandboxes, rollout, training, publication.

    Ctrl-C once drains and leaves a run that the same command with the same --run-dir resumes; twice stops at once.
    """
    overrides = list(set_ or [])
    overrides += [f"steps={steps}"] if steps is not None else []
    overrides += [f"seed={seed}"] if seed is not None else []
    loaded = load(recipe, overrides=overrides)
    _drive(loaded, run_dir or _fresh(loaded), json=json, quiet=quiet)


def rollout(
    recipe: RecipeFile,
    batches: Annotated[int, typer.Option(min=1, help="Batches to collect.")] = 1,
    run_dir: RunDir = None,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Collect batches at fixed weights: no trainer, nothing published."""
    loaded = load(recipe, overrides=[*(set_ or []), f"steps={batches}", "train.embedded=false"])
    _drive(loaded, run_dir or _fresh(loaded), json=json, quiet=quiet, trains=False)


def _fresh(recipe: Recipe) -> Path:
    return Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _drive(recipe: Recipe, folder: Path, *, json: bool, quiet: bool, trains: bool = True) -> None:
    with progress(quiet=quiet or json) as tell:
        summary = asyncio.run(_session(recipe, folder, tell, quiet=quiet, trains=trains))
    if json:
        print_json(summary)
    elif not quiet:
        _closing(summary, folder)
    raise typer.Exit(_EXIT[summary["outcome"]])


async def _session(recipe: Recipe, folder: Path, tell: Lines, *, quiet: bool, trains: bool) -> dict[str, Any]:
    from agentrl.wiring import Trial, build_live

    shown = (lambda step: None) if quiet else _line(recipe)
    trial = Trial(weights="published" if trains else "collected")
    async with build_live(recipe, folder, shown=shown, progress=tell, trial=trial) as live:
        _log_to(folder / "logs" / "run.log")
        if not quiet:
            _mention_services(recipe)
            console.print(f"[dim]run folder[/] {folder}  [dim]see it:[/] agentrl top {folder}", soft_wrap=True)
        _on_interrupt(live)
        live.follow(recipe, tell, trainer=recipe.train.embedded and trains)
        await live.drive()
        return live.summary()


def _mention_services(recipe: Recipe) -> None:
    from agentrl.cli.serve import how_to_use
    from agentrl.wiring.services import Services

    serving = None if recipe.engines.attach else Services("serve", recipe.name).running()
    if serving is not None:
        console.print("[dim]engines of this recipe are up; to use them instead of new ones:[/]")
        console.print("  " + how_to_use(serving, "RECIPE"), soft_wrap=True, markup=False)


def _on_interrupt(live: Run) -> None:
    """SIGINT or SIGTERM once: drain. Twice: cancel."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = []

    def interrupted() -> None:
        asked.append(True)
        if len(asked) == 1:
            console.print("[yellow]draining;[/] once more stops at once")
            live.drain()
        elif task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("agentrl")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def _line(recipe: Recipe) -> Any:
    def show(step: dict[str, Any]) -> None:
        age, tokens, reward = step["age"], step["tokens"], step["reward_mean"]
        console.print(
            f"step [bold]{step['step']:>3}[/]/{recipe.steps}  reward [bold]{reward:.2f}[/] {_bar(reward)}"
            f"  {step['interval_s']:5.1f} s, trainer waited {step['batch_wait_s']:4.1f} s"
            f"  age ≤ {age['max']} (mean {age['mean']:.1f})"
            f"  {tokens['generated'] / max(step['interval_s'], 1e-9):5.0f} tok/s  reuse {step['prefix_reuse']:.2f}"
        )

    return show


def _bar(share: float, width: int = 12) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return f"[green]{'█' * full}[/][dim]{'░' * (width - full)}[/]"


def _closing(summary: dict[str, Any], folder: Path) -> None:
    groups = summary["groups"]
    detail = f": {summary['detail']}" if summary["detail"] else ""
    console.print(
        f"[bold]{summary['outcome']}[/]{detail} after {len(summary['steps'])} steps, {summary['elapsed_s']:.0f} s;"
        f" trainer idle {summary['trainer_idle_fraction']:.0%}, {summary['trainable_per_min']:.0f} trajectories/min;"
        f" groups trained {groups['trained']}, stale {groups['dropped_stale']}, failed {groups['dropped_failed']};"
        f" ledger {'balanced' if summary['ledger_balanced'] else 'NOT BALANCED'}"
    )
    rewards = [step["reward_mean"] for step in summary["steps"]]
    if len(rewards) >= 10:
        first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
        console.print(f"mean reward, first 5 steps {first:.2f} → last 5 steps {last:.2f}")
    console.print(f"[dim]{folder / 'summary.json'}  {folder / 'trace.json'} (open in ui.perfetto.dev)[/]")
