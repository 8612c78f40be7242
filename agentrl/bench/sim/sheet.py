"""What every arm hands back: rows under columns, and claims set beside what was published. All of it simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import NormalDist, mean, stdev
from typing import Any, Literal

from agentrl.records import Record

NEAR = 0.2  # of the published value: within that a prediction is a hit


class Table(Record):
    """Cells are text as printed; the numbers themselves are in the sheet's data."""

    title: str
    columns: tuple[str, ...]  # a leading `>` aligns to the right
    rows: tuple[tuple[str, ...], ...]


class Claim(Record):
    """One published figure and the simulation's. fitted: a constant was chosen so that they agree; then it proves
    nothing. bound: the published value is only a least one."""

    what: str
    published: float
    simulated: float
    unit: str = ""
    fitted: str = ""  # the constant
    bound: bool = False

    @property
    def verdict(self) -> Literal["fitted", "near", "miss"]:
        if self.fitted:
            return "fitted"
        if self.bound:
            return "near" if self.simulated >= self.published else "miss"
        return "near" if abs(self.simulated - self.published) <= NEAR * abs(self.published) else "miss"


class Sheet(Record, kw_only=True):
    """One arm's result."""

    arm: str
    recipe: str
    seeds: int
    mode: str = "simulated"
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    data: dict[str, Any] = {}
    wall_s: float = 0.0


def beside(claims: Sequence[Claim]) -> Table:
    """The claims as a table, misses said plainly."""
    words = {"fitted": "fitted", "near": f"within {NEAR:.0%}", "miss": "MISS"}
    rows = tuple(
        (
            c.what,
            ("at least " if c.bound else "") + _number(c.published, c.unit),
            _number(c.simulated, c.unit),
            f"fitted: {c.fitted}" if c.fitted else ("holds" if c.bound and c.verdict == "near" else words[c.verdict]),
        )
        for c in claims
    )
    return Table(title="beside what was published", columns=("", ">published", ">simulated", "verdict"), rows=rows)


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:+.1f} %"
    shown = f"{value:,.1f}" if abs(value) < 1_000 else f"{value:,.0f}"
    return f"{shown} {unit}".rstrip()


def average(results: Sequence[Mapping[str, Any]], key: str) -> float:
    """Mean of one figure over several runs."""
    return mean(float(result[key]) for result in results)


def interval(values: Sequence[float], level: float = 0.95) -> float:
    """Half the width of the mean's confidence interval (Student's t, by its expansion in the normal quantile)."""
    n = len(values)
    if n < 2:
        return 0.0
    z, v = NormalDist().inv_cdf((1 + level) / 2), n - 1
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return t * stdev(values) / sqrt(n)


def plus_minus(values: Sequence[float], digits: int = 1) -> str:
    return (
        f"{mean(values):.{digits}f} ± {interval(values):.{digits}f}" if len(values) > 1 else f"{values[0]:.{digits}f}"
    )
