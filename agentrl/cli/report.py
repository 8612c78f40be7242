"""`agentrl report`: a run's story in pictures and figures, or two runs' side by side."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from agentrl.cli.common import Json, Quiet, RunFolder, emit, table
from agentrl.errors import UnavailableError

if TYPE_CHECKING:
    from agentrl.report.story import Story


def report(
    run: RunFolder,
    other: Annotated[
        Path | None, typer.Argument(help="A second run, to be shown beside it.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to; default: report/ in the (first) run's folder.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead: draw a part of the (first) run's trace into this PNG.")
    ] = None,
    since: Annotated[float | None, typer.Option("--from", min=0, help="Of the trace, seconds of the run.")] = None,
    until: Annotated[float | None, typer.Option("--to", min=0, help="Default: its last three minutes.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page (index.html, self-contained) and PNGs: where the time went, ages, lengths, reward."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("matplotlib is not installed", hint="pip install 'agentrl[report]'")
    if trace is not None:
        _draw_trace(run, trace, since, until, json=json, quiet=quiet)
        return
    from agentrl.report import page, plots
    from agentrl.wiring.story import read_story

    stories = [read_story(folder) for folder in (run, other) if folder is not None]
    folder = out or run / "report"
    folder.mkdir(parents=True, exist_ok=True)
    shown = [name for name in plots.PLOTS if name != "gap" or any(story.gaps for story in stories)]
    pictures = {name: plots.png(name, stories) for name in shown}
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    (folder / "index.html").write_text(page.html(stories, pictures))
    document = {"page": str(folder / "index.html"), "runs": [_figures(story) for story in stories]}
    emit(document, lambda to: _draw(to, stories, folder), json=json, quiet=quiet)


def _draw_trace(run: Path, to: Path, since: float | None, until: float | None, *, json: bool, quiet: bool) -> None:
    from agentrl.report import tracepicture

    slices = tracepicture.read(run / "trace.json")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(tracepicture.png(slices, run.resolve().name, began=since, ended=until))
    document = {"trace": str(to), "slices": len(slices)}
    emit(document, lambda out: out.print(f"[dim]written[/] {to}", soft_wrap=True), json=json, quiet=quiet)


def _figures(story: Story) -> dict[str, Any]:
    first, last = story.reward
    return {
        "name": story.name,
        "outcome": story.outcome,
        "steps": len(story.steps),
        "elapsed_s": story.elapsed_s,
        "trainer_idle_fraction": story.idle,
        "trainable_per_min": story.per_minute,
        "reward": {"first": first, "last": last},
        "length_ratio": story.length_ratio,
        "counts": story.counts,
        "K": story.bound,
        "audit": [
            {"step": s.step, "oldest": max(age for age, _ in s.tokens), "tokens": dict(s.tokens), "masked": s.masked}
            for s in story.steps
        ],
        "stages_s": story.stages,
        "in_flight": story.in_flight,
        "tokens_lost": {"total": sum(story.lost.values()), "by_step": story.lost},
        "moments": [{"step": s.step, "ready_s": dict(s.ready), **dict(s.moments)} for s in story.steps],
        "rates": {name: msgspec.to_builtins(found) for name, found in story.rates.items()},
        "logprob_gap": [{"step": step, "mean": mean} for step, mean in story.gaps],
    }


def _draw(out: Console, stories: list[Story], folder: Path) -> None:
    from agentrl.report.page import rows

    made = table("", "", *(f">{story.name}" for story in stories))
    for row in rows(stories):
        made.add_row(*row)
    out.print(made)
    out.print(f"[dim]written[/] {folder / 'index.html'}", soft_wrap=True)
