"""Sheets as pictures (PNG). What is simulated or measured says so in its title; what was published is drawn beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agentrl.bench.sim import ladder
from agentrl.bench.sim.sheet import Sheet, interval

OURS, THEIRS, INK = "#3b6ea5", "#c9b37e", "#333333"
LANES = {"reset": "#8fb0d0", "command": "#3b6ea5", "package": "#c96f4a", "verify": "#7a9a54", "cleanup": "#b8b8b8"}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(sheet: Sheet, folder: Path) -> list[Path]:
    """Every picture that this sheet has data for, under its recipe's name."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with mpl.rc_context(STYLE):
        for name, figure in _PICTURES.get(sheet.arm, _none)(sheet):
            path = folder / f"{sheet.recipe}-{name}.png"
            figure.savefig(path, dpi=110)
            made.append(path)
    return made


def _none(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    return iter(())


def _axes(width: float, height: float, rows: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, 1, squeeze=False, **more)
    return figure, [row[0] for row in axes]


def _ladder(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    names = [name for name in sheet.data["arms"] if not name.startswith("(")]
    seconds = [[run["mean_s"] for run in sheet.data["arms"][name]] for name in names]
    figure, [axes] = _axes(7.2, 3.2)
    rows = range(len(names))
    aside = 0.18 if sheet.claims else 0.0  # of the middle: what was published lies below
    ours = axes.barh(
        [row - aside for row in rows],
        [mean(values) for values in seconds],
        0.34,
        xerr=[interval(values) for values in seconds],
        color=OURS,
        ecolor=INK,
        label=f"simulated, {sheet.seeds} seeds, 95 %",
    )
    axes.bar_label(ours, fmt="%.0f s", padding=6)
    if sheet.claims:
        ends = {0: ladder.BEFORE_S, len(names) - 1: ladder.AFTER_S}
        theirs = axes.barh([row + aside for row in ends], list(ends.values()), 0.34, color=THEIRS, label="published")
        axes.bar_label(theirs, fmt="%.1f s", padding=6)
    axes.set_yticks(list(rows), [_fold(name) for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds a batch, fixed weights")
    axes.set_title(f"The ladder on {sheet.recipe} (simulated)")
    axes.legend(loc="lower right")
    yield "ladder", figure
    if sheet.data["timeline"]["at_s"]:
        yield "batch", _timeline(sheet.recipe, sheet.data["timeline"])


def _timeline(recipe: str, data: dict[str, Any]) -> Figure:
    figure, [engines, lanes, bank] = _axes(7.2, 5.0, 3, sharex=True)
    cuts, at = data["cuts_s"], data["at_s"]
    middle = len(cuts) // 2
    begin, end = (cuts[middle - 1] if middle else 0.0), cuts[middle]
    margin = 0.15 * (end - begin)
    shown = [i for i, t in enumerate(at) if begin - margin <= t <= end + margin]
    times = [at[i] for i in shown]

    def part(series: list[int]) -> list[int]:
        return [series[i] for i in shown]

    shades = [mpl.colormaps["Blues"](0.35 + 0.5 * i / max(1, len(data["engines"]) - 1)) for i in range(64)]
    engines.stackplot(times, *map(part, data["engines"].values()), colors=shades, labels=list(data["engines"]))
    engines.set_ylabel("generations")
    engines.set_title(f"How one batch came to be: {recipe} (simulated)")
    lanes.stackplot(times, *map(part, data["lanes"].values()), colors=list(LANES.values()), labels=list(data["lanes"]))
    lanes.set_ylabel("operations")
    bank.step(times, part(data["bank"]), where="post", color=OURS)
    bank.fill_between(times, part(data["bank"]), step="post", color=OURS, alpha=0.25)
    bank.axhline(data["groups"], color=INK, linewidth=0.8, linestyle=":")
    bank.set_ylabel("groups ready")
    bank.set_xlabel("virtual seconds")
    bank.set_ylim(0, data["groups"] + 1)
    for axes in (engines, lanes, bank):
        for cut in (begin, end):
            axes.axvline(cut, color=INK, linewidth=0.8)
        axes.set_xlim(times[0], times[-1])
    for axes in (engines, lanes):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.0)
    bank.annotate("cut", (end, data["groups"] + 0.4), xytext=(4, 0), textcoords="offset points", va="center")
    return figure


def _publication(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    """Of the last setting, whole weights under the loose bound, engines one at a time."""
    setting = sheet.data["arms"][-1]["setting"]
    arms = [arm for arm in sheet.data["arms"] if arm["order"] == "rolling" and arm["setting"] == setting]
    runs = {arm["in_flight"]: arm["runs"] for arm in arms}
    yield "publication-ages", _ages(f"rolling, {setting}, {sheet.recipe}", runs)


def _ages(what: str, arms: dict[str, list[dict[str, Any]]]) -> Figure:
    """How old trained trajectories were at their optimizer step: a histogram for each arm, its mean beside it."""
    found = {name: sum((Counter(run["ages"]) for run in runs), Counter[Any]()) for name, runs in arms.items()}
    oldest = max(int(age) for counts in found.values() for age in counts)
    figure, rows = _axes(7.2, 0.9 + 0.42 * len(arms), len(arms), sharex=True, sharey=True)
    for axes, (name, counts) in zip(rows, found.items(), strict=True):
        total = sum(counts.values())
        ages = {int(age): count / total for age, count in counts.items()}
        axes.bar(list(ages), [100 * share for share in ages.values()], 0.8, color=OURS)
        mean_age = sum(age * share for age, share in ages.items())
        axes.plot([mean_age], [0], "^", color=INK, markersize=5, clip_on=False)
        axes.set_ylabel(_fold(name), rotation=0, ha="right", va="center")
        axes.set_yticks([])
        axes.annotate(f"mean {mean_age:.1f}", (1.0, 0.5), xycoords="axes fraction", ha="right", va="center")
    rows[-1].set_xlim(-0.6, oldest + 1.6)
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    rows[-1].set_xlabel("age of a trajectory's oldest token; triangle: mean")
    title = f"Age at the optimizer step: {what} (simulated)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")
    return figure


def _live(sheet: Sheet, title: str, colours: Sequence[str]) -> Figure:
    """Mean seconds of each arm's runs, single steps as ticks below, and what the CPUs alone would take."""
    arms = sheet.data["arms"]
    figure, [axes] = _axes(7.2, 1.0 + 0.5 * len(arms))
    rows = range(len(arms))
    seconds = [[run["mean_s"] for run in runs] for runs in arms.values()]
    means, spreads = [mean(values) for values in seconds], [interval(values) for values in seconds]
    bars = axes.barh(rows, means, 0.56, xerr=spreads, color=colours, ecolor=INK, zorder=2)
    axes.bar_label(
        bars,
        [f"{each:.2f} s ({each / means[0] - 1:+.0%})" if each != means[0] else f"{each:.2f} s" for each in means],
        padding=6,
    )
    for row, runs in zip(rows, arms.values(), strict=True):
        singles = [single for run in runs for single in run["intervals_s"]]
        axes.plot(singles, [row + 0.39] * len(singles), "|", color=INK, alpha=0.35, markersize=5)
        floor = mean(sum(run["cpu_s"].values()) for run in runs) / sheet.data["cpus"]
        axes.plot([floor, floor], [row - 0.28, row + 0.28], color="white", linewidth=1.5, zorder=3)
    axes.set_yticks(list(rows), [_fold(name) for name in arms])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        f"seconds a step: mean of {len(seconds[0])} runs, 95 %. Ticks: single steps. White: CPUs never idle"
    )
    axes.set_title(f"{title}: {sheet.recipe} (measured)")
    return figure


def _collect(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    yield "collect", _live(sheet, "The ladder, live", [OURS] * len(sheet.data["arms"]))


def _publish(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    colours = [THEIRS if name.startswith("fixed") else OURS for name in sheet.data["arms"]]
    yield "publish", _live(sheet, "Publication, live", colours)


def _speed(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    figure = Figure(figsize=(7.2, 3.0))
    left, right = figure.subplots(1, 2, sharey=True)
    points, hosts = sheet.data["points"], sheet.data["hosts"]
    lines = {"us_per_turn": ("a turn of the world", THEIRS), "us_per_event": ("an event in the core", OURS)}
    for axes, along, key_x in ((left, points, "in_flight"), (right, hosts, "hosts")):
        xs = [point[key_x] for point in along]
        for key, (label, colour) in lines.items():
            axes.plot(xs, [point[key] for point in along], "o-", color=colour, label=label)
            for x, point in zip(xs, along, strict=True):
                axes.annotate(
                    f"{point[key]:.0f}", (x, point[key]), xytext=(0, 7), textcoords="offset points", ha="center"
                )
        axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:,}" for x in xs])
        axes.minorticks_off()
        axes.margins(x=0.12)
    left.set_ylim(0, 1.3 * max(point["us_per_turn"] for point in (*points, *hosts)))
    left.set_xlabel(f"trajectories in flight, {points[0]['hosts']} hosts")
    right.set_xlabel(f"hosts, {hosts[0]['in_flight']:,} trajectories in flight")
    left.set_ylabel("CPU µs")
    left.set_title("What work costs the simulator (measured)")
    left.legend(loc="lower left", bbox_to_anchor=(0.0, 0.18))
    yield "speed", figure


def _windows(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    """One panel for each bound."""
    bounds = sorted({row["K"] for row in sheet.data["windows"]}, reverse=True)
    figure, panels = _axes(7.2, 2.9 * len(bounds), len(bounds))
    for axes, bound in zip(panels, bounds, strict=True):
        rows = [row for row in sheet.data["windows"] if row["K"] == bound]
        _policies(axes, {row["arm"]: row["runs"] for row in rows}, lambda name: name.startswith("auto"))
        axes.set_title(f"K = {bound}, {sheet.recipe} (simulated)")
    panels[-1].set_xlabel(_WHOLE_STEP)
    yield "windows", figure


def _peers(sheet: Sheet) -> Iterator[tuple[str, Figure]]:
    loose = max(row["K"] for row in sheet.data["policies"])
    runs = {row["name"]: row["runs"] for row in sheet.data["policies"] if row["K"] in (0, loose)}
    ours = {row["name"] for row in sheet.data["policies"] if row["ours"]}
    figure, [axes] = _axes(7.2, 3.4)
    _policies(axes, runs, ours.__contains__)
    axes.set_xlabel(_WHOLE_STEP)
    axes.set_title(f"Other policies: {sheet.recipe} (simulated)")
    yield "peers", figure
    yield "peers-ages", _ages(f"{sheet.recipe}, K = {loose}", runs)


_WHOLE_STEP = "seconds a batch, a trainer and live updates included"


def _policies(axes: Axes, runs: dict[str, list[dict[str, Any]]], ours: Callable[[str], bool]) -> None:
    """A bar for each policy's seconds, and how much of the length of what it opened it brought back."""
    seconds = [[run["mean_s"] for run in each] for each in runs.values()]
    bars = axes.barh(
        range(len(runs)),
        [mean(values) for values in seconds],
        0.6,
        xerr=[interval(values) for values in seconds],
        color=[OURS if ours(name) else THEIRS for name in runs],
        ecolor=INK,
    )
    labels = [
        f"{mean(values):.0f} s, length {mean(run['returned_ratio'] for run in each):.2f}"
        for each, values in zip(runs.values(), seconds, strict=True)
    ]
    axes.bar_label(bars, labels, padding=6)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.margins(x=0.45)


def _fold(name: str) -> str:
    return name.replace(", ", ",\n", 1) if len(name) > 30 else name


_PICTURES: dict[str, Callable[[Sheet], Iterator[tuple[str, Figure]]]] = {
    "ladder": _ladder,
    "publication": _publication,
    "speed": _speed,
    "peers": _peers,
    "window": _windows,
    "collect": _collect,
    "publish": _publish,
}
