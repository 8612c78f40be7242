"""The report as one HTML page that needs nothing beside it, and its figures as a table for any medium."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from agentrl.report.story import Story

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 1100px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: .2em 1em .2em 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid #8884; }
figure { margin: .6em 0; overflow-x: auto; }
img { min-width: 640px; max-width: 100%; background: white; border-radius: 4px; }
"""


def figures(story: Story) -> dict[str, str]:
    """Name to figure, as people read it."""
    first, last = story.reward
    lengths = "-" if story.length_ratio is None else f"{story.length_ratio:.2f}"
    oldest = max((age for step in story.steps for age, _ in step.ages), default=0)
    return {
        "outcome": story.outcome,
        "steps": str(len(story.steps)),
        "elapsed": f"{story.elapsed_s:.0f} s",
        "trainer idle": f"{100 * story.idle:.0f} %",
        "trained trajectories a minute": f"{story.per_minute:.0f}",
        "reward, first and last fifth": f"{first:.2f}, {last:.2f}",
        "oldest group trained (K)": f"{oldest} ({story.bound})",
        "tokens trained, by age": _by_age(story),
        f"tokens lost to new weights ({story.in_flight})": _lost(story),
        "tokens masked": str(sum(step.masked for step in story.steps)),
        "length of trained over completed": lengths,
        **{name: str(count) for name, count in story.counts.items()},
        **{f"mean seconds: {stage}": f"{seconds:.2f}" for stage, seconds in story.stages.items()},
    }


def headline(story: Story) -> str:
    """The run in one line."""
    first, last = story.reward
    oldest = max((age for step in story.steps for age, _ in step.ages), default=0)
    parts = (
        f"{story.outcome} after {len(story.steps)} steps in {story.elapsed_s:.0f} s",
        f"{story.per_minute:.0f} trajectories a minute trained",
        f"the trainer idle {100 * story.idle:.0f} % from the first batch on",
        f"reward {first:.2f} → {last:.2f}",
        f"no group older than {oldest} versions (K = {story.bound})",
    )
    return "; ".join(parts)


def _lost(story: Story) -> str:
    total = sum(story.lost.values())
    return f"{total:,}, {total / len(story.lost):,.0f} a step" if story.lost else "-"


def _by_age(story: Story) -> str:
    ages: Counter[int] = Counter()
    for step in story.steps:
        ages.update(dict(step.tokens))
    return ", ".join(f"{age}: {100 * count / ages.total():.0f} %" for age, count in sorted(ages.items())) or "-"


def rows(stories: Sequence[Story]) -> list[tuple[str, ...]]:
    """(name, figure of each run); what one run lacks is a dash."""
    told = [figures(story) for story in stories]
    names = list(dict.fromkeys(name for each in told for name in each))
    return [(name, *(each.get(name, "-") for each in told)) for name in names]


def html(stories: Sequence[Story], pictures: Mapping[str, bytes]) -> str:
    """pictures: PNGs by name; they are put into the page."""
    title = escape(" and ".join(story.name for story in stories))
    head = "".join(f"<th>{escape(story.name)}</th>" for story in stories)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(stories))
    drawn = "".join(
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></figure>'
        for name, data in pictures.items()
    )
    lines = "".join(f"<p><b>{escape(story.name)}</b>: {escape(headline(story))}.</p>" for story in stories)
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{viewport}<title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{lines}{drawn}<h2>Figures</h2><table><tr><th></th>{head}</tr>{body}</table></html>\n"
    )
