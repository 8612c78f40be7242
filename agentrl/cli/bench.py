"""`agentrl bench NAME`: figures of one part on this machine, measured or simulated."""

from __future__ import annotations

import importlib.util
import json as text
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomli_w
import typer
from rich.console import Console

from agentrl.bench.sim.sheet import Sheet, beside
from agentrl.cli.common import FAILED, Quiet, RecipeFile, RunFolder, Set, console, out, table
from agentrl.cli.progress import progress
from agentrl.errors import UnavailableError
from agentrl.recipe.load import load, load_sim
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sim import SimRecipe

app = typer.Typer(
    help="Measured and simulated figures, printed as a table. Say beside a measured one what else the machine did.",
    no_args_is_help=True,
)


class Arms(StrEnum):
    LADDER = "ladder"
    SERVING = "serving"
    PUBLICATION = "publication"
    PEERS = "peers"
    ROUNDS = "rounds"
    WINDOW = "window"
    SPEED = "speed"


class InFlight(StrEnum):
    CONTINUE = "continue"
    FINISH = "finish"
    REGENERATE = "regenerate"
    RESTART = "restart"


MaybeRecipe = Annotated[Path | None, typer.Argument(help="Default: the part's own defaults.", show_default=False)]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file; - is stdout.")]


@app.command()
def engine(
    recipe: MaybeRecipe = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each load; the best counts.")] = 3,
    set_: Set = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Tokens a second at 1, 16 and 64 sequences, and how much of a prompt is not computed again."""
    from agentrl.bench import engine as part

    with _busy("measuring one engine", json, quiet):
        figures = part.main(_recipe(recipe, set_), repeats=repeats, quiet=True)
    _give(figures, lambda to: to.print(part.table(figures), markup=False), json, quiet)


@app.command()
def sandbox(
    recipe: MaybeRecipe = None,
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each kind.")] = 20,
    many: Annotated[int, typer.Option(min=1, help="Sandboxes alive at once.")] = 64,
    set_: Set = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Start, exec, put, reset and kill of a sandbox; commands a second; memory of each; also through the daemon."""
    from agentrl.bench import sandbox as part

    with _busy("measuring sandboxes", json, quiet):
        figures = part.main(_recipe(recipe, set_), repeats=repeats, many=many)
    _give(figures, lambda to: _draw_sandbox(to, figures), json, quiet)


@app.command()
def ssh(
    host: Annotated[str, typer.Argument(help="As ssh calls it.", show_default=False)],
    rate: Annotated[float, typer.Option(min=1, help="Turns a second.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=1, help="Of each way.")] = 10.0,
    body_kb: Annotated[int, typer.Option(min=1, help="What a turn sends.")] = 48,
    answer_kb: Annotated[int, typer.Option(min=1, help="What it gets back.")] = 8,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Latency and CPU that a turn pays for the way through SSH. An echo server runs there meanwhile."""
    from agentrl.bench import ssh as part

    with _busy(f"measuring the way to {host}", json, quiet):
        figures = part.main(host, rate=rate, seconds=seconds, body_kb=body_kb, answer_kb=answer_kb)
    _give(figures, lambda to: to.print(part.table(figures), markup=False), json, quiet)


@app.command()
def laws(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds to play.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """The scheduler in a rude simulated world, every law after every event. Exit 1 where one breaks."""
    from agentrl.bench import laws as part

    figures = part.sweep(seeds, first=first, quiet=quiet)
    _give(figures, lambda to: part.show(figures), json, quiet)
    if figures["failures"]:
        raise typer.Exit(FAILED)


@app.command()
def sim(
    recipe: RecipeFile,
    arms: Annotated[Arms, typer.Option(help="Which comparison.")] = Arms.LADDER,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm, from the recipe's seed on.")] = 3,
    figures: Annotated[Path | None, typer.Option(help="Draw PNG figures into this folder.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Instead: one run of it as a run's folder, for top and report.")
    ] = None,
    set_: Set = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Policies on a simulated fleet in virtual time, set beside published figures. RECIPE: recipes/sim/*.toml."""
    from agentrl.bench.sim import main as part

    loaded = load_sim(recipe, overrides=set_ or [])
    if keep is not None:
        _keep(loaded, keep, json, quiet)
        return
    with _busy(f"simulating {arms} of {loaded.name}, {seeds} seeds", json, quiet):
        sheet = part.run(loaded, arms, seeds)
    if figures is not None:
        from agentrl.bench.figures import draw

        for path in draw(sheet, figures):
            _say(quiet, f"drew {path}")
    _give(msgspec.to_builtins(sheet, enc_hook=str), lambda to: _draw_sheet(to, sheet), json, quiet)


def _keep(recipe: SimRecipe, folder: Path, json: Path | None, quiet: bool) -> None:
    from agentrl.wiring.recording import keep

    finish = keep(recipe, recipe.seed, folder)
    said = f"{finish.outcome} [dim]in virtual time; see it:[/] agentrl top {folder}"
    _give({"folder": str(folder), "outcome": finish.outcome}, lambda to: to.print(said), json, quiet)


Repeat = Annotated[int, typer.Option(min=1, help="Runs of each arm, from the recipe's seed on.")]
OutFolder = Annotated[
    Path | None, typer.Option(help="Keeps each arm's run, for report and top. Default: runs/bench-WHAT-NAME-TIME.")
]
Figures = Annotated[Path | None, typer.Option(help="Draw PNG figures into this folder.")]


@app.command()
def collect(
    recipe: RecipeFile,
    batches: Annotated[int | None, typer.Option(min=1, help="Of each run; default: the recipe's steps.")] = None,
    repeat: Repeat = 3,
    out: OutFolder = None,
    figures: Figures = None,
    set_: Set = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Live, at fixed weights: what routing, lanes and the bank each take off the time to a batch."""
    from agentrl.bench.live import collect as part

    loaded = load(recipe, overrides=[*(set_ or []), *([f"steps={batches}"] if batches else [])])
    _live("collect", loaded, partial(part.run, loaded, recipe, repeat=repeat), out, figures, json, quiet)


@app.command()
def publish(
    recipe: RecipeFile,
    steps: Annotated[int | None, typer.Option(min=1, help="Of each run; default: the recipe's.")] = None,
    repeat: Repeat = 3,
    in_flight: Annotated[list[InFlight] | None, typer.Option(help="Only this. May be repeated.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Both orders of each, also at half the K.")] = False,
    out: OutFolder = None,
    figures: Figures = None,
    set_: Set = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Live, with a trainer: what each strategy of publication adds to a step, and what it throws away."""
    from agentrl.bench.live import publish as part

    loaded = load(recipe, overrides=[*(set_ or []), *([f"steps={steps}"] if steps else [])])
    run = partial(part.run, loaded, recipe, full=full, in_flight=in_flight or list(InFlight), repeat=repeat)
    _live("publish", loaded, run, out, figures, json, quiet)


def _live(
    what: str,
    recipe: Recipe,
    run: Callable[..., Sheet],
    out: Path | None,
    figures: Path | None,
    json: Path | None,
    quiet: bool,
) -> None:
    """The sheet is kept beside the runs as well."""
    if figures is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("matplotlib is not installed", hint="pip install 'agentrl[report]'")
    folder = out or Path("runs") / f"bench-{what}-{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"
    silent = quiet or str(json) == "-"
    with progress(quiet=silent) as tell:
        sheet = run(out=folder, tell=tell, said=lambda line: _say(silent, line))
    (folder / "sheet.json").write_bytes(msgspec.json.format(msgspec.json.encode(sheet)))
    if figures is not None:
        from agentrl.bench.figures import draw

        for path in draw(sheet, figures):
            _say(silent, f"drew {path}")
    _give(msgspec.to_builtins(sheet), lambda to: _draw_sheet(to, sheet), json, quiet)
    _say(silent, f"each arm's runs and sheet.json: {folder}")


@app.command()
def calibrate(
    run: RunFolder,
    against: Annotated[list[Path] | None, typer.Option(help="Another run to predict. May be repeated.")] = None,
    cpus: Annotated[int, typer.Option(min=0, help="Of the machine that ran it; 0: of this one.")] = 0,
    into: Annotated[Path | None, typer.Option(help="Write the simulated fleet's recipe to this TOML file.")] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """A live run as a recipe of the simulated fleet, and how well that predicts the step interval of other runs."""
    from agentrl.bench import calibrate as part

    with _busy(f"simulating {run}", json, quiet):
        sheet = part.main(run, against or [], cpus=cpus)
    if into is not None:
        into.write_bytes(tomli_w.dumps(sheet.data["recipe"]).encode())
    _give(msgspec.to_builtins(sheet, enc_hook=str), lambda to: _draw_sheet(to, sheet), json, quiet)


@app.command()
def watch(
    attempts: Annotated[int, typer.Option(min=16, help="Conversations in flight.")] = 2_048,
    turns: Annotated[float, typer.Option(min=0.1, help="Turns a second of all of them.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=1, help="Of each measurement.")] = 20.0,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """What trace, metrics and `agentrl top` cost a large run: CPU, bytes a second, how late its event loop is."""
    from agentrl.bench import watch as part

    with _busy(f"{attempts} conversations, three times {seconds:.0f} s", json, quiet):
        figures = part.main(attempts=attempts, turns_per_s=turns, seconds=seconds)
    _give(figures, lambda to: _draw_watch(to, figures), json, quiet)


def _draw_watch(to: Console, figures: dict[str, Any]) -> None:
    columns = (">turns/s", ">CPU of a core", ">loop late, median", ">worst", ">events", ">trace", ">CPU of top")
    made = table("", "with", *columns)
    for arm in figures["arms"]:
        made.add_row(
            arm["watched_by"],
            f"{arm['turns_per_s']:.0f}",
            f"{100 * arm['cpu']:.1f} %",
            f"{arm['lag_median_ms']:.1f} ms",
            f"{arm['lag_worst_ms']:.0f} ms",
            f"{arm['stream_bytes_per_s'] / 1e3:.1f} kB/s",
            f"{arm['trace_bytes_per_s'] / 1e3:.0f} kB/s",
            "" if arm["top_cpu"] is None else f"{100 * arm['top_cpu']:.1f} %",
        )
    to.print(made)
    to.print(
        f"[dim]{figures['attempts']} conversations, {figures['cpus']} CPUs; one picture for top is"
        f" {figures['arms'][-1]['status_bytes'] / 1e3:.0f} kB, at most one a second[/]"
    )


def _draw_sheet(to: Console, sheet: Sheet) -> None:
    for made in (*sheet.tables, *([beside(sheet.claims)] if sheet.claims else [])):
        drawn = table(made.title, *made.columns)
        for row in made.rows:
            drawn.add_row(*row)
        to.print(drawn)
        to.print()
    for note in sheet.notes:
        to.print(f"[dim]{note}[/]")
    to.print(f"[dim]{sheet.mode}: {sheet.recipe}, {sheet.seeds} seeds, {sheet.wall_s:.0f} s of wall time[/]")


def _recipe(path: Path | None, overrides: list[str] | None) -> Recipe | None:
    return load(path, overrides=overrides or []) if path is not None else None


@contextmanager
def _busy(what: str, json: Path | None, quiet: bool) -> Iterator[None]:
    """Says what is measured; on a terminal for how long, and of a simulation which run is played."""
    from agentrl.bench.fleet import telling

    _say(quiet, what)
    with progress(quiet=quiet or str(json) == "-") as tell, telling(tell):
        tell("measuring", "")
        yield


def _say(quiet: bool, what: str) -> None:
    if not quiet:
        console.print(f"[dim]{what}[/]")


def _give(figures: dict[str, Any], draw: Callable[[Console], None], json: Path | None, quiet: bool) -> None:
    if str(json) == "-":
        typer.echo(text.dumps(figures, indent=2))
        return
    if json is not None:
        json.write_text(text.dumps(figures, indent=2) + "\n")
    if not quiet:
        draw(out)


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
        f" {_megabytes(backend['pss_mb_per_box'])}, all killed in {backend['many_kill_s']:.2f} s;"
        f" through the daemon, {daemon['callers']} callers: {daemon['execs_per_s']:.0f} commands/s"
    )
    to.print(f"[dim]{figures['cpus']} CPUs, load before {figures['busy_before']:.1f}[/]")


def _megabytes(each: float) -> str:
    """An ordinary user may not read the memory of processes in another user namespace: then it is not a number."""
    return f"{each:.2f} MB each" if each == each else "memory not readable by this user"
