"""What a live bench makes of a run's summary, and of several runs: pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import mean, median, quantiles
from typing import Any, Literal

from agentrl.bench.sim.sheet import Table, interval
from agentrl.records import Record, Trajectory

WARM = 2  # first intervals left out: engines, caches and window are empty

Run = Mapping[str, Any]


def measured(summary: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Of the steps after the first WARM, unless it says otherwise. Seconds, tokens; shares of 1. trajectories: all that
    the run kept."""
    steps = summary["steps"][WARM:]
    seconds = [step["interval_s"] for step in steps]
    generated = sum(step["tokens"]["generated"] for step in steps)
    wasted = sum(step["tokens"]["wasted"] for step in steps)
    swaps = [engine for publication in summary["publications"][WARM:] for engine in publication["engines"]]
    groups, attempts = summary["groups"], summary["attempts"]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "intervals_s": seconds,
        "mean_s": mean(seconds),
        "median_s": median(seconds),
        "train_s": mean(step["train_s"] for step in steps),
        "publish_s": mean(step["publish_s"] for step in steps),
        "wait_s": mean(step["batch_wait_s"] for step in steps),
        "trajectories_per_min": 60 * sum(step["trajectories"] for step in steps) / sum(seconds),
        "generated": generated / len(steps),  # a step
        "wasted": wasted / len(steps),  # a step
        "wasted_share": wasted / max(1, generated),
        "dropped": groups["dropped_stale"] + groups["dropped_failed"],  # of the whole run
        "ages": dict(sum((Counter(step["age"]["histogram"]) for step in steps), Counter[str]())),
        "age_max": max(step["age"]["max"] for step in steps),
        "age_mean": mean(step["age"]["mean"] for step in steps),
        "reward": mean(step["reward_mean"] for step in steps),
        "length_ratio": summary["length_ratio"],  # of the whole run
        "reuse": sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),  # whole run
        "engine_s": mean(turn.engine_s for turn in turns),  # of a turn, whole run
        "pauses_s": [swap["pause_s"] for swap in swaps],
        "stage_s": mean([swap["stage_s"] for swap in swaps] or [0.0]),
        "lost": sum(publication["lost_tokens"] for publication in summary["publications"][WARM:])
        / max(1, len(summary["publications"][WARM:])),
        "attempts": {name: attempts[name] for name in ("retried", "restarted", "fallbacks", "turns_regenerated")},
    }


def of(runs: Sequence[Run], key: str) -> float:
    """Mean over runs."""
    return mean(float(run[key]) for run in runs)


def spread(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of all intervals of all runs."""
    low, middle, high = quantiles(chain.from_iterable(run["intervals_s"] for run in runs), n=4, method="inclusive")
    return low, middle, high


def seconds_cells(runs: Sequence[Run]) -> tuple[str, str, str]:
    """Median; quartiles; mean over runs with its 95 % interval."""
    low, middle, high = spread(runs)
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}", plus_minus([run["mean_s"] for run in runs])


def saved(before: Sequence[Run], after: Sequence[Run]) -> list[float]:
    """Seconds of a step that `after` takes less, repetition by repetition: the same seed on both sides."""
    return [a["mean_s"] - b["mean_s"] for a, b in zip(before, after, strict=True)]


def less(before: Sequence[Run], after: Sequence[Run]) -> list[float]:
    """The same as a share of `before`."""
    return [1 - b["mean_s"] / a["mean_s"] for a, b in zip(before, after, strict=True)]


def plus_minus(values: Sequence[float], *, percent: bool = False, signed: bool = False) -> str:
    """Mean and the half width of its 95 % interval, which one value does not have."""
    scale, digits, unit = (100, 1, " %") if percent else (1, 2, "")
    shown = f"{scale * mean(values):{'+' if signed else ''}.{digits}f}"
    return f"{shown} ± {scale * interval(values):.{digits}f}{unit}" if len(values) > 1 else f"{shown}{unit}"


class Aim(Record):
    """values: one for each repetition, shares of 1. most: the aim is an upper bound, else a lower one."""

    what: str
    aim: float
    values: tuple[float, ...]
    most: bool = False

    @property
    def verdict(self) -> Literal["met", "MISSED", "not settled"]:
        """Not settled: the interval of the mean holds the aim, or there is no interval."""
        off = (self.aim - mean(self.values)) * (1 if self.most else -1)
        if len(self.values) < 2 or abs(off) < interval(self.values):
            return "not settled"
        return "met" if off >= 0 else "MISSED"


def aims_table(aims: Sequence[Aim]) -> Table:
    rows = tuple(
        (
            aim.what,
            f"{'at most' if aim.most else 'at least'} {100 * aim.aim:g} %",
            plus_minus(aim.values, percent=True),
            aim.verdict,
        )
        for aim in aims
    )
    return Table(title="aims", columns=("", ">aim", ">measured ± 95 %", "verdict"), rows=rows)


def cpu_table(arms: Mapping[str, Sequence[Run]], cpus: int) -> Table:
    """Who spends the machine's CPU seconds. floor: those of a step, were no CPU ever idle."""
    roles = tuple(next(iter(arms.values()))[0]["cpu_s"])
    rows = []
    for name, runs in arms.items():
        spent = [mean(run["cpu_s"][role] for run in runs) for role in roles]
        floor, took = sum(spent) / cpus, of(runs, "mean_s")
        cells = (f"{floor / took:.0%}", f"{floor:.2f}", f"{took / floor:.2f}" if floor else "-")
        rows.append((name, *(f"{seconds:.2f}" for seconds in spent), *cells))
    columns = ("", *(f">{role}" for role in roles), ">CPUs busy", ">floor s", ">over floor")
    return Table(title=f"CPU seconds of a step, {cpus} CPUs", columns=columns, rows=tuple(rows))
