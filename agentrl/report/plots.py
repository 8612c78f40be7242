"""A run's story in pictures, or two runs' side by side. Each plot is one function of one story and one pair of axes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from agentrl.report.story import STAGES, Rate, Story

matplotlib.rcParams["svg.fonttype"] = "none"

BLUE, ORANGE, GREEN, RED, GREY = "#4477aa", "#ee7733", "#228833", "#cc3311", "#999999"

Draw = Callable[[Story, Any], None]

_SANDBOX = ("opening", "tool", "verifying")
_MANY = 60  # bars beyond which gaps between them only flicker


def timeline(story: Story, axes: Any) -> None:
    at = [s.step for s in story.steps]
    waited = [s.waited_s for s in story.steps]
    wide = _wide(at)
    axes.bar(at, waited, wide, color=RED, label="trainer waited for the batch")
    axes.bar(at, [s.train_s for s in story.steps], wide, bottom=waited, color=BLUE, label="optimizer step")
    axes.plot(at, [s.interval_s for s in story.steps], color=GREY, lw=1, label="since the batch before")
    _labels(axes, "step", "seconds")


def idle(story: Story, axes: Any) -> None:
    share = [100 * s.waited_s / s.interval_s if s.interval_s else 0.0 for s in story.steps]
    at = [s.step for s in story.steps]
    axes.bar(at, share, _wide(at), color=RED, label="of each step")
    axes.axhline(100 * story.idle, color=GREY, lw=1, label=f"of the run: {100 * story.idle:.0f} %")
    axes.set_ylim(0, 100)
    _labels(axes, "step", "trainer idle, %")


def bank(story: Story, axes: Any) -> None:
    at = [s.at_s for s in story.samples]
    axes.fill_between(at, [s.bank for s in story.samples], step="post", color=GREEN, alpha=0.6, label="ready groups")
    axes.step(at, [s.places for s in story.samples], where="post", color=GREY, lw=0.8, label="places used")
    axes.axhline(story.batch_groups, color=BLUE, lw=1, ls="--", label=f"a batch: {story.batch_groups}")
    _labels(axes, "seconds", "groups")


def ages(story: Story, axes: Any) -> None:
    at = [s.step for s in story.steps]
    oldest = max((age for s in story.steps for age, _ in s.ages), default=0)
    bottom = [0] * len(at)
    for age in range(oldest + 1):
        counts = [dict(s.ages).get(age, 0) for s in story.steps]
        shade = matplotlib.colormaps["viridis_r"](0.1 + 0.8 * age / max(1, story.bound, oldest))
        axes.bar(at, counts, _wide(at), bottom=bottom, color=shade, label=f"age {age}")
        bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    axes.yaxis.get_major_locator().set_params(integer=True)
    _labels(axes, "step", f"groups of the batch (K = {story.bound})")


def lengths(story: Story, axes: Any) -> None:
    found = (
        ("completed", story.lengths.completed, GREY),
        ("trained", story.lengths.trained, BLUE),
        ("dropped", story.lengths.dropped, RED),
    )
    top = max(story.lengths.completed, default=1)
    for name, values, colour in found:
        if values:
            mean = sum(values) / len(values)
            label = f"{name}: {len(values)}, mean {mean:.0f}"
            axes.hist(values, bins=30, range=(0, top), histtype="step", color=colour, lw=1.5, label=label)
    _labels(axes, "tokens of a trajectory", "trajectories")


def stages(story: Story, axes: Any) -> None:
    shown = [stage for stage in reversed(STAGES) if stage in story.stages]
    values = [story.stages[stage] for stage in shown]
    colours = dict.fromkeys(("prefill", "decode", "training"), BLUE) | dict.fromkeys(_SANDBOX, GREEN)
    colours |= {"queue": RED, "lane_wait": RED, "publication": ORANGE}
    bars = axes.barh(
        [stage.replace("_", " ") for stage in shown], values, color=[colours.get(stage, GREY) for stage in shown]
    )
    axes.bar_label(bars, [f"{value:.1f} s" for value in values], padding=3, fontsize=8)
    axes.margins(x=0.15)
    _labels(axes, "mean seconds of a trained trajectory", "")


def rates(story: Story, axes: Any) -> None:
    """What became of finished work, in shares, one bar for each bucket of each dimension."""
    shown = _over(story)[::-1]
    left = [0.0] * len(shown)
    for what, colour in (("trained", BLUE), ("stale", ORANGE), ("dropped", RED)):
        shares = [getattr(rate, what) / (rate.trained + rate.stale + rate.dropped) for _, rate in shown]
        axes.barh([name for name, _ in shown], [100 * share for share in shares], left=left, color=colour, label=what)
        left = [a + 100 * b for a, b in zip(left, shares, strict=True)]
    for at, (_, rate) in enumerate(shown):
        axes.text(101, at, f"{rate.trained}, age {rate.age:.1f}", fontsize=7, va="center")
    axes.set_xlim(0, 100)
    _labels(axes, "% of finished trajectories; at the right: how many were trained, and their mean age", "")


def _over(story: Story) -> list[tuple[str, Rate]]:
    found = [(f"{name} {rate.bucket}", rate) for name, rates in story.rates.items() for rate in rates]
    return [(name, rate) for name, rate in found if rate.completion is not None]


def reward(story: Story, axes: Any) -> None:
    values = [s.reward for s in story.steps]
    axes.plot([s.step for s in story.steps], values, color=GREY, lw=0.8, label="of each batch")
    smooth = [sum(values[max(0, i - 4) : i + 1]) / len(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
    axes.plot([s.step for s in story.steps], smooth, color=BLUE, lw=2, label="mean of the last 5")
    _labels(axes, "step", "reward")


def gap(story: Story, axes: Any) -> None:
    axes.plot([step for step, _ in story.gaps], [value for _, value in story.gaps], color=ORANGE, label="mean")
    axes.set_ylim(bottom=0)
    _labels(axes, "step", "|logprob, trainer - engine|")


PLOTS: dict[str, tuple[str, Draw]] = {
    "timeline": ("What each step waited for", timeline),
    "idle": ("Trainer idle", idle),
    "bank": ("The bank: ready groups against the next batch", bank),
    "ages": ("Ages at the cut", ages),
    "lengths": ("Lengths of trained, completed and dropped work", lengths),
    "stages": ("From a trajectory's start to live weights", stages),
    "rates": ("What became of finished work", rates),
    "reward": ("Reward", reward),
    "gap": ("Log-prob gap on fresh tokens", gap),
}


def png(name: str, stories: Sequence[Story]) -> bytes:
    """One plot, a column for each run, on the same scale."""
    title, draw = PLOTS[name]
    high = max(3.4, 1.0 + 0.17 * max(len(_over(story)) for story in stories)) if name == "rates" else 3.4
    size = (8.5 * len(stories), high if len(stories) == 1 else high + 0.3)
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    every = figure.subplots(1, len(stories), squeeze=False, sharey=True, sharex=name in ("stages", "lengths"))[0]
    for story, axes in zip(stories, every, strict=True):
        if story.steps or name == "bank":
            draw(story, axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title if len(stories) == 1 else story.name, fontsize=10, loc="left", pad=20)  # above the legend
    if len(stories) > 1:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": "agentrl"})
    return data.getvalue()


def _labels(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    if x == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=5)


def _wide(bars: Sequence[int]) -> float:
    return 0.8 if len(bars) <= _MANY else 1.0
