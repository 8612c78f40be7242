"""How much surplus: windows of a fixed width beside one that follows what is measured, and orders of admission within
it, under the recipe's K and half of it. Same tasks, seeds and cap on conversations in flight."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any, Literal, NamedTuple

import msgspec

from agentrl.bench.fleet import Recorder, simulate
from agentrl.bench.sim.sheet import Sheet, Table, average, interval, plus_minus
from agentrl.recipe.sim import SimRecipe
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.sim.fleet.build import plans_of
from agentrl.wiring.fleet import Options

LEAST_RATIO = 0.98  # of lengths: what is trained against what was opened
_WARM = 2  # a run's first 1/_WARM of its batches are left out: windows grow a quarter a batch


class Arm(NamedTuple):
    """width: in batches; auto: as measured."""

    name: str
    width: float | Literal["auto"]
    admission: str = "fifo"
    when_stale: str = "drop"


ARMS = (
    Arm("2 batches wide", 2),
    Arm("4 batches wide", 4),
    Arm("8 batches wide", 8),
    Arm("8 wide, soonest to expire first", 8, "expiry"),
    Arm("auto", "auto"),
    Arm("auto, soonest to expire first", "auto", "expiry"),
    Arm("auto, nothing expires", "auto", "expiry", "wait"),
)


class _Watch(Recorder):
    """And W at every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        super().heard(now, event, commands, core)
        self.widths += [core.window.groups for order in commands if isinstance(order, orders.TrainOn)]


def recipe_of(recipe: SimRecipe, arm: Arm, bound: int) -> SimRecipe:
    policy = msgspec.structs.replace(
        recipe.policy,
        K=bound,
        window_groups="auto" if arm.width == "auto" else round(arm.width * recipe.policy.groups),
        window_attempts=recipe.window_attempts,
        admission=arm.admission,
        when_stale=arm.when_stale,
    )
    return msgspec.structs.replace(recipe, policy=policy)


def play(recipe: SimRecipe, arm: Arm, bound: int, seed: int) -> dict[str, Any]:
    watch = _Watch()
    finish = simulate(recipe_of(recipe, arm, bound), seed, Options(), watch, watch=watch.watch)
    assert watch.fleet is not None
    return {
        "outcome": finish.outcome,
        **watch.result(watch.fleet.core, warm=recipe.steps // _WARM),
        "returned_ratio": watch.returned_ratio(plans_of(recipe, seed)),
        "widths": watch.widths,
        "limits": [msgspec.to_builtins(limit) for limit in watch.fleet.core.window.limits],
    }


def run(recipe: SimRecipe, seeds: int) -> Sheet:
    bounds = (recipe.policy.K, recipe.policy.K // 2)
    played = {
        bound: {arm: [play(recipe, arm, bound, recipe.seed + seed) for seed in range(seeds)] for arm in ARMS}
        for bound in bounds
    }
    return Sheet(
        arm="window",
        recipe=recipe.name,
        seeds=seeds,
        tables=tuple(_table(recipe, bound, played[bound]) for bound in bounds),
        notes=(
            f"at most {recipe.window_attempts} conversations at once for all; trainer step {recipe.trainer.step_s:g} s,"
            f" whole weights, {recipe.publish.order}, {recipe.publish.in_flight}; {recipe.steps} steps, the last"
            f" {recipe.steps - recipe.steps // _WARM} count",
            "length: tokens of trained trajectories over those of all that were opened in the first half of the run;"
            " below 1 favours short work",
            "less: the paired difference to 2 batches wide, 95 % over seeds",
            f"the aim for the length of auto: at least {LEAST_RATIO}",
        ),
        data={
            "windows": [
                {"K": bound, "arm": arm.name, "runs": runs} for bound in bounds for arm, runs in played[bound].items()
            ]
        },
    )


def _table(recipe: SimRecipe, bound: int, played: dict[Arm, list[dict[str, Any]]]) -> Table:
    first = [run["mean_s"] for run in played[ARMS[0]]]
    rows = []
    for arm, runs in played.items():
        less = [before - run["mean_s"] for before, run in zip(first, runs, strict=True)]
        rows.append(
            (
                arm.name,
                f"{mean(run['widths'][-1] for run in runs) / recipe.policy.groups:.1f}",
                plus_minus([run["mean_s"] for run in runs]),
                f"{-mean(less):.1f} ± {interval(less):.1f}",
                f"{average(runs, 'returned_ratio'):.3f}",
                f"{min(run['returned_ratio'] for run in runs):.3f}",
                f"{average(runs, 'age_mean'):.2f}",
                f"{max(run['age_max'] for run in runs)}",
                f"{mean(sum(run['dropped'].values()) for run in runs):.1f}",
                f"{average(runs, 'wasted_share'):.1%}",
                f"{average(runs, 'peak_sandboxes'):.0f}",
            )
        )
    columns = (
        *("", ">W/B at the end", ">s a batch", ">less", ">length", ">least", ">mean age", ">max age", ">drops"),
        *(">wasted", ">sandboxes"),
    )
    return Table(title=f"windows (simulated), K = {bound}, {recipe.name}", columns=columns, rows=tuple(rows))
