"""`agentrl bench collect RECIPE`: the ladder, live, at fixed weights: the same tasks, seeds, verifier and batch in each
arm. Its last rung is the recipe as it is; one more arm shows what a window of twice that depth would give."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from agentrl.bench.live.play import Arm, Runs, play_all, ready
from agentrl.bench.live.sheet import Aim, aims_table, cpu_table, less, of, plus_minus, saved, seconds_cells
from agentrl.bench.sim.sheet import Sheet, Table
from agentrl.errors import RecipeError
from agentrl.ports import Progress
from agentrl.recipe.schema import Recipe
from agentrl.wiring import Trial

WIDER = "(twice that window)"
AIM = 0.669  # less than before the ladder: public, of the post's fixed-weight collection


def arms_of(recipe: Recipe, file: Path) -> tuple[Arm, ...]:
    """RecipeError where the recipe has no surplus, or collects in rounds."""
    if recipe.schedule.mode != "async":
        hint = "--set schedule.mode=async: the ladder's first arm is the round"
        raise RecipeError(f"{file}: schedule.mode", f"{recipe.schedule.mode} has no bank", hint=hint)
    if recipe.window.groups != "auto" and recipe.window_groups <= recipe.batch.groups:
        hint = f"--set window.groups={2 * recipe.batch.groups}"
        raise RecipeError(f"{file}: window.groups", "no surplus over the batch: the last two arms are one", hint=hint)
    replace, batch = msgspec.structs.replace, recipe.batch
    full = replace(recipe, train=replace(recipe.train, embedded=False))
    whole = batch.groups * (batch.siblings + batch.spare)
    narrow = replace(
        full,
        window=replace(recipe.window, groups=batch.groups, attempts=max(whole, recipe.window_attempts)),
        schedule=replace(recipe.schedule, admission="fifo"),
    )
    deeper = replace(
        full, window=replace(recipe.window, groups=2 * recipe.window_groups, attempts=2 * recipe.window_attempts)
    )
    wide = "a window that sets itself" if recipe.window.groups == "auto" else f"window of {recipe.window_groups} groups"
    return (
        Arm(
            name="launch order, per-request routing, one pool",
            recipe=narrow,
            trial=Trial(weights="collected", per_request=True, pooled=True),
        ),
        Arm(name="+ group and sticky routing", recipe=narrow, trial=Trial(weights="collected", pooled=True)),
        Arm(name="+ lanes", recipe=narrow, trial=Trial(weights="collected")),
        Arm(name=f"+ completion-order bank, {wide}", recipe=full, trial=Trial(weights="collected")),
        *([Arm(name=WIDER, recipe=deeper, trial=Trial(weights="collected"))] if recipe.window.groups != "auto" else []),
    )


def run(recipe: Recipe, file: Path, *, repeat: int, out: Path, tell: Progress, said: Callable[[str], None]) -> Sheet:
    """Blocking. Errors of `ready` and `arms_of` before anything starts."""
    arms = arms_of(recipe, file)
    ready(recipe, file, arms, out)
    runs, wall_s = play_all(arms, repeat, out, tell, said)
    return sheet(recipe, runs, wall_s)


def sheet(recipe: Recipe, runs: Runs, wall_s: float) -> Sheet:
    played = [each for name, each in runs.items() if name != WIDER]
    cpus = len(os.sched_getaffinity(0))
    aim = Aim(what="the whole ladder, less seconds a batch", aim=AIM, values=tuple(less(played[0], played[-1])))
    return Sheet(
        arm="collect",
        recipe=recipe.name,
        seeds=len(played[0]),
        mode="measured",
        tables=(_arms(runs), _steps(runs), cpu_table(runs, cpus), aims_table([aim])),
        notes=(
            "seconds from cut to cut at fixed weights, the first two left out; launch order: a window of one batch, all"
            " of it started at once and nothing else until it is cut",
            "reuse: prompt tokens that came from a cache; turn: what a turn takes in the engine, waiting included;"
            " faults: attempts retried",
            "floor: CPU seconds of a batch over the CPUs; no policy can be faster on this machine with this work",
            "the same arms simulated, of a fleet of GPU hosts: agentrl bench sim recipes/sim/terminal-bench-b300.toml"
            " --arms ladder",
        ),
        data={"arms": runs, "cpus": cpus, "aim": AIM},
        wall_s=wall_s,
    )


def _arms(runs: Runs) -> Table:
    rows = tuple(
        (
            name,
            *seconds_cells(each),
            f"{of(each, 'trajectories_per_min'):.0f}",
            f"{of(each, 'reuse'):.0%}",
            f"{1e3 * of(each, 'engine_s'):.0f}",
            f"{of(each, 'length_ratio'):.3f}",
            f"{of(each, 'dropped'):.1f}",
            f"{of(each, 'wasted_share'):.1%}",
            f"{of(each, 'generated'):.0f}",
            f"{of(each, 'reward'):.2f}",
            f"{of([run['attempts'] for run in each], 'retried'):.1f}",
        )
        for name, each in runs.items()
    )
    columns = ("", ">median s", ">quartiles", ">mean ± 95 %", ">traj/min", ">reuse", ">turn ms")
    work = (">length", ">drops", ">wasted", ">tokens", ">reward", ">faults")
    return Table(title="ladder, seconds a batch", columns=(*columns, *work), rows=rows)


def _steps(runs: Runs) -> Table:
    def row(name: str, before: str, after: str) -> tuple[str, ...]:
        gains = saved(runs[before], runs[after])
        helps = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
        share = plus_minus([-x for x in less(runs[before], runs[after])], percent=True, signed=True)
        return name, plus_minus([-gain for gain in gains], signed=True), share, helps

    names = [name for name in runs if name != WIDER]
    rows = [row(after, before, after) for before, after in pairwise(names)]
    rows.append(row("all together", names[0], names[-1]))
    return Table(
        title="each step",
        columns=("", ">s ± 95 %", ">of the arm before", ">repetitions it helps"),
        rows=tuple(rows),
    )
