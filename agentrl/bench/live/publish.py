"""`agentrl bench publish RECIPE`: the repeating step, live: real weights, trained and published after every batch, by
each strategy, beside the same step with nothing published."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec

from agentrl.bench.live.play import Arm, Runs, play_all, ready
from agentrl.bench.live.sheet import Aim, Run, aims_table, cpu_table, of, plus_minus, saved, seconds_cells
from agentrl.bench.sim.sheet import Sheet, Table
from agentrl.errors import RecipeError
from agentrl.ports import Progress
from agentrl.recipe.schema import Recipe
from agentrl.wiring import Trial

AIM = 0.05  # of a step, that publication adds to one with nothing published

UNTRAINED = "fixed weights, no trainer"
UNPUBLISHED = "fixed weights, trainer beside"
ORDERS = ("all", "rolling")
IN_FLIGHT = ("continue", "finish", "regenerate", "restart")
USUAL = (("all", "continue"), *(("rolling", how) for how in IN_FLIGHT))


def name_of(order: str, how: str, bound: int) -> str:
    return f"{order}, {how}, K = {bound}"


def arms_of(recipe: Recipe, file: Path, *, full: bool, in_flight: Sequence[str] = IN_FLIGHT) -> tuple[Arm, ...]:
    """Both references, then the matrix. RecipeError where the recipe has nothing that could be compared.

    in_flight: only these.
    """
    if not recipe.train.embedded:
        hint = "leave it out, or --set train.embedded=true"
        raise RecipeError(f"{file}: train.embedded", "false, but the bench starts its trainer", hint=hint)
    if recipe.engines.count < 2:
        hint = "--set engines.count=2"
        raise RecipeError(f"{file}: engines.count", "one engine: rolling and all are the same", hint=hint)
    replace = msgspec.structs.replace
    bound = recipe.freshness.K
    matrix = [(order, how, bound) for order, how in USUAL]
    if full:
        matrix = [(order, how, k) for k, order, how in product({bound // 2: 0, bound: 0}, ORDERS, IN_FLIGHT)]
    untrained = replace(recipe, train=replace(recipe.train, embedded=False))
    return (
        Arm(name=UNTRAINED, recipe=untrained, trial=Trial(weights="collected")),
        Arm(name=UNPUBLISHED, recipe=recipe, trial=Trial(weights="unpublished")),
        *(
            Arm(
                name=name_of(order, how, k),
                recipe=replace(
                    recipe,
                    publish=replace(recipe.publish, order=order, in_flight=how),
                    freshness=replace(recipe.freshness, K=k),
                ),
                trial=Trial(),
            )
            for order, how, k in matrix
            if how in in_flight
        ),
    )


def run(
    recipe: Recipe,
    file: Path,
    *,
    full: bool,
    in_flight: Sequence[str],
    repeat: int,
    out: Path,
    tell: Progress,
    said: Callable[[str], None],
) -> Sheet:
    """Blocking. Errors of `ready` and `arms_of` before anything starts."""
    arms = arms_of(recipe, file, full=full, in_flight=in_flight)
    ready(recipe, file, arms, out)
    runs, wall_s = play_all(arms, repeat, out, tell, said)
    return sheet(recipe, runs, wall_s)


def sheet(recipe: Recipe, runs: Runs, wall_s: float) -> Sheet:
    cpus = len(os.sched_getaffinity(0))
    published = {name: each for name, each in runs.items() if name not in (UNTRAINED, UNPUBLISHED)}
    rolling = name_of("rolling", "continue", recipe.freshness.K)
    aims = [
        Aim(what=f"{name}: seconds added to a step", aim=AIM, values=tuple(_added(runs, name, UNPUBLISHED)), most=True)
        for name in published
        if name == rolling
    ]
    return Sheet(
        arm="publish",
        recipe=recipe.name,
        seeds=len(runs[UNPUBLISHED]),
        mode="measured",
        tables=(
            _seconds(runs),
            _swaps(published),
            _work(runs),
            cpu_table(runs, cpus),
            *([aims_table(aims)] if aims else []),
        ),
        notes=(
            "seconds from cut to cut, the first two left out, publication inside; added: to the step in which the"
            " trainer trains the same batches and nothing of it is published, seed by seed",
            "pause: what one engine stands still for. lost: sampled and thrown away at a publication. wasted: tokens of"
            " a step that never train, those of attempts that start over included; faults: attempts retried",
            "the same arms simulated, of a fleet of GPU hosts: agentrl bench sim recipes/sim/terminal-bench-b300.toml"
            " --arms publication",
        ),
        data={"arms": runs, "cpus": cpus, "aim": AIM, "aim_arm": rolling},
        wall_s=wall_s,
    )


def _added(runs: Runs, name: str, reference: str) -> list[float]:
    """As shares of the reference, repetition by repetition."""
    return [
        -gain / run["mean_s"] for gain, run in zip(saved(runs[reference], runs[name]), runs[reference], strict=True)
    ]


def _seconds(runs: Runs) -> Table:
    """Added to the step with nothing published; and against pausing all engines under the same K, where that ran."""

    def against(name: str) -> str:
        others = [other for other in runs if other.startswith("all, continue") and other.endswith(name.split(", ")[-1])]
        if not others or others == [name]:
            return ""
        return plus_minus([-s for s in saved(runs[others[0]], runs[name])], signed=True)

    rows = []
    for name, each in runs.items():
        added = [-s for s in saved(runs[UNPUBLISHED], each)]
        cells = ("", "")
        if name != UNPUBLISHED:
            share = plus_minus(_added(runs, name, UNPUBLISHED), percent=True, signed=True)
            cells = (plus_minus(added, signed=True), share)
        rows.append((name, *seconds_cells(each), *cells, against(name)))
    columns = ("", ">median s", ">quartiles", ">mean ± 95 %", ">added s", ">added", ">against all, continue, s")
    return Table(title="publication, seconds a step", columns=columns, rows=tuple(rows))


def _swaps(published: Runs) -> Table:
    def pause(each: Sequence[Run]) -> tuple[str, str]:
        pauses = [1e3 * seconds for run in each for seconds in run["pauses_s"]] or [0.0]
        return f"{sum(pauses) / len(pauses):.1f}", f"{max(pauses):.0f}"

    rows = tuple(
        (
            name,
            *pause(each),
            f"{1e3 * of(each, 'stage_s'):.0f}",
            f"{of(each, 'publish_s'):.2f}",
            f"{of(each, 'lost'):.1f}",
            f"{of(each, 'wasted'):.0f}",
            *(f"{_attempts(each, what):.1f}" for what in ("turns_regenerated", "restarted", "fallbacks")),
        )
        for name, each in published.items()
    )
    columns = ("", ">pause ms", ">worst", ">stage ms", ">publish s", ">tokens lost", ">wasted a step")
    return Table(title="each publication", columns=(*columns, ">turns again", ">restarted", ">fallbacks"), rows=rows)


def _attempts(each: Sequence[Run], what: str) -> float:
    return of([run["attempts"] for run in each], what)


def _work(runs: Mapping[str, Sequence[Run]]) -> Table:
    rows = tuple(
        (
            name,
            f"{of(each, 'age_mean'):.2f}",
            f"{max(run['age_max'] for run in each)}",
            f"{of(each, 'dropped'):.1f}",
            f"{of(each, 'wasted_share'):.1%}",
            f"{of(each, 'length_ratio'):.3f}",
            f"{of(each, 'reward'):.2f}",
            f"{of(each, 'reuse'):.0%}",
            f"{of(each, 'generated'):.0f}",
            f"{of(each, 'train_s'):.2f}",
            f"{of(each, 'wait_s'):.2f}",
            f"{_attempts(each, 'retried'):.1f}",
        )
        for name, each in runs.items()
    )
    columns = ("", ">mean age", ">max", ">drops", ">wasted", ">length", ">reward", ">reuse", ">tokens a step")
    return Table(title="the same work", columns=(*columns, ">train s", ">waited s", ">faults"), rows=rows)
