"""The published ladder, step by step, at fixed weights: the same tasks, seeds and batch in every arm."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

import msgspec

from agentrl.bench.fleet import play
from agentrl.bench.sim.sheet import Claim, Sheet, Table, average, interval, plus_minus
from agentrl.bench.sim.timeline import watch
from agentrl.recipe.sim import SimRecipe
from agentrl.wiring.fleet import Options

BEFORE_S, AFTER_S, ISOLATION_S = 591.8, 196.1, 29.1  # public: the post's fixed-weight collection
ROUTING_LEAST_S = 183.3  # derived: routing is the largest of three steps that sum to 395.7 s, isolation one of them
REUSE = (0.48, 0.96)  # public: exact prefix reuse without and with sticky routing
RATE, TOKENS_MIN = 78.3, 827e3  # public: trajectories and tokens a minute at the end of the ladder


class Arm(NamedTuple):
    """width: the window over the batch; 1 is no surplus, and then completion order is launch order, batch by batch."""

    name: str
    width: float
    per_request: bool
    lanes: str


def arms(recipe: SimRecipe) -> tuple[Arm, ...]:
    wide = recipe.window_groups / recipe.policy.groups
    return (
        Arm("launch order, no surplus, per-request routing, one pool", 1, True, "pooled"),
        Arm("+ group and sticky routing", 1, False, "pooled"),
        Arm("+ lanes", 1, False, "isolated"),
        Arm(f"+ completion-order bank, {wide:g} batches wide", wide, False, "isolated"),
    )


def recipe_of(recipe: SimRecipe, arm: Arm) -> SimRecipe:
    policy = msgspec.structs.replace(
        recipe.policy, window_groups=round(arm.width * recipe.policy.groups), window_attempts=0, admission="fifo"
    )
    fleet = msgspec.structs.replace(recipe.fleet, lanes=arm.lanes)
    return msgspec.structs.replace(recipe, policy=policy, fleet=fleet)


def run(recipe: SimRecipe, seeds: int) -> Sheet:
    steps = arms(recipe)
    wider = Arm("(wider still: twice that)", 2 * steps[-1].width, False, "isolated")
    played = {arm.name: _play(recipe, arm, seeds) for arm in (*steps, wider)}
    gains, cold = _gains(steps, played, "mean_s"), _gains(steps, played, "cold_s")
    return Sheet(
        arm="ladder",
        recipe=recipe.name,
        seeds=seeds,
        tables=(_table(steps, wider, played), _steps(steps, gains, cold)),
        claims=_claims(recipe, steps, played, gains, cold),
        notes=(
            "warm: mean time from cut to cut after the first two batches, at fixed weights; unfinished groups carry"
            " over; cold: the first batch of an empty fleet; 95 %: of the paired differences, over seeds",
            "which of the two senses the published collection has is not known",
            "the published width of the bank is not known; the last row shows what a wider one would give",
        ),
        data={
            "arms": played,
            "gains": gains,
            "gains_cold": cold,
            "timeline": watch(recipe_of(recipe, steps[-1]), recipe.seed, Options(fixed_weights=True)),
        },
    )


def _play(recipe: SimRecipe, arm: Arm, seeds: int) -> list[dict[str, Any]]:
    options = Options(fixed_weights=True, per_request=arm.per_request)
    return [play(recipe_of(recipe, arm), recipe.seed + seed, options) for seed in range(seeds)]


Gains = list[list[float]]


def _gains(steps: tuple[Arm, ...], played: dict[str, list[dict[str, Any]]], key: str) -> Gains:
    """Seconds that each step takes off, seed by seed."""
    return [
        [a[key] - b[key] for a, b in zip(played[before.name], played[after.name], strict=True)]
        for before, after in pairwise(steps)
    ]


def _table(steps: tuple[Arm, ...], wider: Arm, played: dict[str, list[dict[str, Any]]]) -> Table:
    rows = []
    for arm in (*steps, wider):
        results = played[arm.name]
        seconds = [r["mean_s"] for r in results]
        rows.append(
            (
                arm.name,
                f"{median(seconds):.1f}",
                plus_minus(seconds),
                f"{average(results, 'cold_s'):.0f}",
                f"{average(results, 'reuse'):.0%}",
                f"{average(results, 'length_ratio'):.3f}",
                f"{mean(sum(r['dropped'].values()) for r in results):.1f}",
                f"{average(results, 'wasted_share'):.1%}",
                f"{average(results, 'peak_sandboxes'):.0f}",
                f"{average(results, 'peak_kv'):.1%}",
                f"{average(results, 'trajectories_per_min'):.0f}",
            )
        )
    columns = (
        *("", ">median s", ">mean ± 95 %", ">cold s", ">reuse", ">length", ">drops", ">wasted", ">sandboxes"),
        *(">peak KV", ">traj/min"),
    )
    return Table(title="ladder (simulated), seconds a batch", columns=columns, rows=tuple(rows))


def _steps(steps: tuple[Arm, ...], gains: Gains, cold: Gains) -> Table:
    def cells(seconds: list[float]) -> tuple[str, str]:
        return f"{-mean(seconds):.1f} ± {interval(seconds):.1f}", f"{sum(x > 0 for x in seconds)} of {len(seconds)}"

    rows = tuple((arm.name, *cells(a), *cells(b)) for arm, a, b in zip(steps[1:], gains, cold, strict=True))
    columns = ("", ">warm s ± 95 %", ">seeds it helps", ">cold s ± 95 %", ">seeds it helps")
    return Table(title="each step (simulated)", columns=columns, rows=rows)


def _claims(
    recipe: SimRecipe, steps: tuple[Arm, ...], played: dict[str, list[dict[str, Any]]], gains: Gains, cold: Gains
) -> tuple[Claim, ...]:
    if recipe.workload.preset != "terminal-bench":
        return ()

    def of(step: int, key: str) -> float:
        return average(played[steps[step].name], key)

    before, after = of(0, "mean_s"), of(3, "mean_s")
    cold_before, cold_after = of(0, "cold_s"), of(3, "cold_s")
    routing, lanes, bank = (mean(g) for g in gains)
    cold_routing, *cold_others = (mean(g) for g in cold)
    return (
        Claim(what="before", published=BEFORE_S, simulated=before, unit="s", fitted="fleet.flops_share"),
        Claim(what="isolation", published=-ISOLATION_S, simulated=-lanes, unit="s", fitted="fleet.greed"),
        Claim(what="after", published=AFTER_S, simulated=after, unit="s"),
        Claim(what="the whole ladder", published=AFTER_S / BEFORE_S - 1, simulated=after / before - 1, unit="%"),
        Claim(what="routing step", published=ROUTING_LEAST_S, simulated=routing, unit="s less", bound=True),
        Claim(what="routing less the next largest step", published=0, simulated=routing - max(lanes, bank), bound=True),
        Claim(what="before, cold", published=BEFORE_S, simulated=cold_before, unit="s"),
        Claim(what="after, cold", published=AFTER_S, simulated=cold_after, unit="s"),
        Claim(
            what="the whole ladder, cold",
            published=AFTER_S / BEFORE_S - 1,
            simulated=cold_after / cold_before - 1,
            unit="%",
        ),
        Claim(what="routing step, cold", published=ROUTING_LEAST_S, simulated=cold_routing, unit="s less", bound=True),
        Claim(
            what="routing less the next largest step, cold",
            published=0,
            simulated=cold_routing - max(cold_others),
            bound=True,
        ),
        Claim(what="reuse without stickiness", published=REUSE[0], simulated=of(0, "reuse"), unit="%"),
        Claim(what="reuse with it", published=REUSE[1], simulated=of(3, "reuse"), unit="%"),
        Claim(what="trajectories a minute", published=RATE, simulated=of(3, "trajectories_per_min")),
        Claim(what="tokens a minute, tools' included", published=TOKENS_MIN, simulated=of(3, "tokens_per_min")),
    )
