"""Rounds at fixed weights: trained when all of a round is there (sync), or group by group as they complete (pipelined),
beside no rounds at all (async). The same tasks, seeds, samples a round and optimizer steps in each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import Any

import msgspec

from agentrl.bench.fleet import Recorder, simulate
from agentrl.bench.sim.sheet import Claim, Sheet, Table, average, interval, plus_minus
from agentrl.recipe.sim import SimRecipe
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.wiring.fleet import Options

ROUND_STEPS = (4, 8)
MODES = ("sync", "pipelined", "async")
PUBLISHED = (-0.307, -0.423)  # RolloutPipe (arXiv 2606.26997) against its sync baseline, least and most
HALF = 0.5  # training's share of a round in that baseline (its trainer waits 47 to 52 % of it)
_ROUNDS = 2  # the first is left out: without rounds the fleet is still filling


Played = dict[tuple[str, int, str], list[dict[str, Any]]]
"""(how long training takes, steps a round, mode) -> a run for each seed."""


class Rounds(Recorder):
    """And each round: when its first attempt starts, its first batch is cut, its last step ends."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self._stepped = 0
        self._open = True  # nothing of this round was started yet
        self.began: list[float] = []
        self.first_cut: list[float] = []
        self.trained: list[float] = []

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        super().heard(now, event, commands, core)
        if isinstance(event, news.StepFinished):
            self._stepped += 1
            if self._stepped % self._steps == 0:
                self.trained.append(now)
                self._open = True
        for order in commands:
            if isinstance(order, orders.StartAttempt) and self._open:
                self._open = False
                self.began.append(now)
            elif isinstance(order, orders.TrainOn) and order.batch % self._steps == 0:
                self.first_cut.append(now)


def recipe_of(recipe: SimRecipe, mode: str, steps: int, step_s: float) -> SimRecipe:
    """steps: of a round, whose groups are the window in every mode; conversations in flight are the recipe's."""
    replace = msgspec.structs.replace
    groups = steps * recipe.policy.groups
    policy = replace(
        recipe.policy,
        mode=mode,
        round_groups=groups if mode != "async" else 0,
        window_groups=groups,
        window_attempts=recipe.window_attempts,
        K=max(recipe.policy.K, 2 * steps),
    )
    return replace(recipe, steps=_ROUNDS * steps, policy=policy, trainer=replace(recipe.trainer, step_s=step_s))


def play(recipe: SimRecipe, mode: str, steps: int, step_s: float, seed: int) -> dict[str, Any]:
    """Seconds of rounds after the first, on average. cycle: from one round's last step to the next one's."""
    rounds = Rounds(steps)
    finish = simulate(recipe_of(recipe, mode, steps, step_s), seed, Options(), rounds, watch=rounds.watch)
    assert rounds.fleet is not None
    ends = rounds.trained
    result = rounds.result(rounds.fleet.core, warm=steps)
    kept = ("age_max", "age_mean", "length_ratio", "dropped", "wasted_share", "virtual_s")
    found = {name: result[name] for name in kept} | {
        "outcome": finish.outcome,
        "step_s": step_s,
        "samples": sum(cut["trajectories"] for cut in rounds.cuts),
        "steps": len(rounds.cuts),
        "cycle_s": (ends[-1] - ends[0]) / (len(ends) - 1),
    }
    if mode == "async":
        return found
    spans = list(zip(rounds.began, rounds.first_cut, ends, strict=True))[1:]
    whole = mean(end - began for began, _, end in spans)
    return found | {
        "round_s": whole,
        "first_cut_s": mean(cut - began for began, cut, _ in spans),
        "waits": 1 - steps * step_s / whole,
    }


def run(recipe: SimRecipe, seeds: int) -> Sheet:
    settings = (f"{recipe.trainer.step_s:g} s a step", "half of a round")
    played: Played = {}
    for setting, steps, mode in product(settings, ROUND_STEPS, MODES):
        runs = played[setting, steps, mode] = []
        for seed in range(seeds):
            step_s = recipe.trainer.step_s
            if setting != settings[0]:
                step_s = _half(played[settings[0], steps, "sync"][seed]) / steps
            runs.append(play(recipe, mode, steps, step_s, recipe.seed + seed))
    return Sheet(
        arm="rounds",
        recipe=recipe.name,
        seeds=seeds,
        tables=(_seconds(recipe, played), _details(recipe, played)),
        claims=tuple(
            Claim(
                what=f"pipelined against sync, {steps} steps a round, training {setting}",
                published=mean(PUBLISHED),
                simulated=-mean(_less(played, setting, steps, "pipelined", "round_s")),
                unit="%",
            )
            for setting in settings
            for steps in ROUND_STEPS
        ),
        notes=(
            f"a step: {recipe.policy.groups} groups of {recipe.policy.siblings}; for all a window of a round's groups"
            f" and at most {recipe.window_attempts} conversations at once; {_ROUNDS} rounds, the first left out; whole"
            " weights, published after the last step of a round, without rounds after each",
            "round: from its first attempt's start to the end of its last optimizer step (rollout to train end)."
            " cycle: from one such end to the next, publication included",
            "less: against sync, paired by seed, 95 % over seeds. waits: the trainer's share of a round",
            f"published: {PUBLISHED[0]:.1%} to {PUBLISHED[1]:.1%} (arXiv 2606.26997: 1.7 B, 16 trajectories a step, 16"
            f" to 48 steps a round, its mean is compared); training takes about half of its baseline's rounds",
        ),
        data={
            "arms": [
                {"training": setting, "round_steps": steps, "mode": mode, "runs": runs}
                for (setting, steps, mode), runs in played.items()
            ]
        },
    )


def _half(sync: dict[str, Any]) -> float:
    """Seconds of training that would be HALF of this round: it is its rollouts, then its steps."""
    rollouts_s: float = sync["round_s"] * sync["waits"]
    return rollouts_s * HALF / (1 - HALF)


def _less(played: Played, setting: str, steps: int, mode: str, key: str) -> list[float]:
    """Shares of sync's seconds, seed by seed."""
    sync, other = played[setting, steps, "sync"], played[setting, steps, mode]
    return [1 - b[key] / a[key] for a, b in zip(sync, other, strict=True)]


def _percent(values: Sequence[float]) -> str:
    return f"{-100 * mean(values):+.1f} ± {100 * interval(values):.1f} %"


def _seconds(recipe: SimRecipe, played: Played) -> Table:
    rows = []
    for (setting, steps, mode), runs in played.items():
        rounds, sync = mode != "async", mode == "sync"
        rows.append(
            (
                f"{setting}, {steps} steps a round, {mode}",
                plus_minus([run["round_s"] for run in runs]) if rounds else "-",
                _percent(_less(played, setting, steps, mode, "round_s")) if rounds and not sync else "",
                plus_minus([run["cycle_s"] for run in runs]),
                "" if sync else _percent(_less(played, setting, steps, mode, "cycle_s")),
                f"{average(runs, 'first_cut_s'):.0f}" if rounds else "-",
                f"{average(runs, 'waits'):.0%}" if rounds else "-",
            )
        )
    columns = ("", ">round s", ">less", ">cycle s", ">less", ">first batch at s", ">waits")
    return Table(title=f"rounds (simulated), {recipe.name}", columns=columns, rows=tuple(rows))


def _details(recipe: SimRecipe, played: Played) -> Table:
    rows = tuple(
        (
            f"{setting}, {steps} steps a round, {mode}",
            f"{average(runs, 'step_s'):.0f}",
            f"{average(runs, 'samples'):.0f}",
            f"{average(runs, 'steps'):.0f}",
            f"{average(runs, 'age_mean'):.2f}",
            f"{max(run['age_max'] for run in runs)}",
            f"{average(runs, 'length_ratio'):.3f}",
            f"{sum(sum(run['dropped'].values()) for run in runs) / len(runs):.1f}",
            f"{average(runs, 'wasted_share'):.1%}",
        )
        for (setting, steps, mode), runs in played.items()
    )
    columns = ("", ">step s", ">samples", ">steps", ">mean age", ">max age", ">length", ">drops", ">wasted")
    return Table(title=f"the same work (simulated), {recipe.name}", columns=columns, rows=rows)
