"""What a weight change costs: order by what becomes of work in flight by freshness bound, over complete steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from agentrl.bench.fleet import play
from agentrl.bench.sim.sheet import Claim, Sheet, Table, average, plus_minus
from agentrl.recipe.sim import SimRecipe
from agentrl.wiring.fleet import Options

ROLLING_S = 240.1  # public: complete repeating step, one of four engines at a time, K = 8
AGAINST_ALL = -0.437  # public: against pausing all engines, read as seconds
LIVE_SHARE = 0.11  # public: share of a step that live updates take on SWE-Bench

PAUSE = {
    "freeze": "the load; requests keep their KV and go on, each token marked with its version",
    "drain turn": "the load and the end of every running turn, nothing admitted meanwhile",
    "regenerate": "the load and a grace; unfinished turns are given up and sampled anew",
    "finish": "the load; the engine gets nothing new until its conversations have ended under the old weights",
    "restart": "the load; its conversations start over from their first turn",
}
"""What an engine stands still for, and what becomes of its work."""

_POLICY = {"freeze": "continue", "drain turn": "continue"}  # else by the same name
ARMS = tuple((order, how) for how in PAUSE for order in ("all", "rolling"))


class Setting(NamedTuple):
    """sentinel: no optimizer runs and names are published in place of weights, as in the published runs."""

    name: str
    widen: int  # times the recipe's window
    bound: int
    sentinel: bool


SETTINGS = (
    Setting("as published", 1, 8, True),
    Setting("whole weights, K = 4", 2, 4, False),
    Setting("whole weights, K = 8", 2, 8, False),
)
Runs = list[dict[str, Any]]


def recipe_of(recipe: SimRecipe, setting: Setting, order: str, how: str) -> SimRecipe:
    replace = msgspec.structs.replace
    window = setting.widen * recipe.window_groups
    return replace(
        recipe,
        policy=replace(recipe.policy, K=setting.bound, window_groups=window, window_attempts=0),
        publish=replace(recipe.publish, order=order, in_flight=_POLICY.get(how, how), finish_timeout_s=3_600.0),
        trainer=replace(recipe.trainer, step_s=0.0 if setting.sentinel else recipe.trainer.step_s),
    )


def run(recipe: SimRecipe, seeds: int) -> Sheet:
    fixed = {
        setting: [
            play(recipe_of(recipe, setting, "all", "freeze"), recipe.seed + seed, Options(fixed_weights=True))
            for seed in range(seeds)
        ]
        for setting in (SETTINGS[0], SETTINGS[2])
    }
    played = {
        (setting, order, how): _play(recipe, setting, order, how, seeds) for setting in SETTINGS for order, how in ARMS
    }
    return Sheet(
        arm="publication",
        recipe=recipe.name,
        seeds=seeds,
        tables=(_seconds(recipe, fixed, played), _details(played), _pauses()),
        claims=_claims(recipe, fixed, played),
        notes=(
            f"seconds: cut to cut, publication inside. As published: W = {recipe.window_groups}, no optimizer, names in"
            f" place of weights. Whole weights: W = {2 * recipe.window_groups}, a trainer step of"
            f" {recipe.trainer.step_s:g} s, {recipe.fleet.weights_dtype.upper()} weights staged while engines serve",
            "a place of the window is free again once the new weights are live",
            "what the published arms did to work in flight is not known; the row that is compared is named",
        ),
        data={
            "fixed": {setting.name: runs for setting, runs in fixed.items()},
            "arms": [
                {"setting": setting.name, "order": order, "in_flight": how, "runs": runs}
                for (setting, order, how), runs in played.items()
            ],
        },
    )


def _play(recipe: SimRecipe, setting: Setting, order: str, how: str, seeds: int) -> Runs:
    options = Options(drain=how == "drain turn", sentinel=setting.sentinel)
    return [play(recipe_of(recipe, setting, order, how), recipe.seed + seed, options) for seed in range(seeds)]


Played = dict[tuple[Setting, str, str], Runs]


def _seconds(recipe: SimRecipe, fixed: dict[Setting, Runs], played: Played) -> Table:
    def cell(runs: Runs | None) -> str:
        return plus_minus([run["mean_s"] for run in runs]) if runs else "-"

    rows = [("fixed weights", *(cell(fixed.get(setting)) for setting in SETTINGS))]
    rows += [(f"{order}, {how}", *(cell(played[setting, order, how]) for setting in SETTINGS)) for order, how in ARMS]
    columns = ("", *(f">{setting.name}" for setting in SETTINGS))
    return Table(title=f"publication (simulated), seconds a step, {recipe.name}", columns=columns, rows=tuple(rows))


def _details(played: Played) -> Table:
    rows = []
    for order, how in ARMS:
        runs = played[SETTINGS[2], order, how]
        rows.append(
            (
                f"{order}, {how}",
                f"{average(runs, 'pause_s_mean'):.1f}",
                f"{max(run['age_max'] for run in runs)}",
                f"{average(runs, 'age_mean'):.2f}",
                f"{sum(sum(run['dropped'].values()) for run in runs) / len(runs):.1f}",
                f"{average(runs, 'wasted_share'):.1%}",
                f"{average(runs, 'length_ratio'):.3f}",
                f"{average(runs, 'reuse'):.0%}",
            )
        )
    columns = ("", ">pause s", ">max age", ">mean age", ">drops", ">wasted", ">length", ">reuse")
    return Table(title=f"{SETTINGS[2].name} (simulated)", columns=columns, rows=tuple(rows))


def _pauses() -> Table:
    return Table(title="what an engine's pause holds", columns=("in flight", "pause"), rows=tuple(PAUSE.items()))


def _claims(recipe: SimRecipe, fixed: dict[Setting, Runs], played: Played) -> tuple[Claim, ...]:
    def seconds(order: str, how: str) -> float:
        return average(played[SETTINGS[0], order, how], "mean_s")

    rolling = seconds("rolling", "freeze")
    if recipe.workload.preset != "terminal-bench":
        share = 1 - average(fixed[SETTINGS[0]], "mean_s") / rolling
        what = "share of a step that live updates take (rolling, freeze)"
        return (Claim(what=what, published=LIVE_SHARE, simulated=share, unit="%"),)
    steps = [
        Claim(what=f"complete step, rolling, {how}", published=ROLLING_S, simulated=seconds("rolling", how), unit="s")
        for how in ("freeze", "finish")
    ]
    against = [
        Claim(
            what=f"rolling against all, {how}",
            published=AGAINST_ALL,
            simulated=seconds("rolling", how) / seconds("all", how) - 1,
            unit="%",
        )
        for how in ("freeze", "drain turn", "finish")
    ]
    return (*steps, *against)
