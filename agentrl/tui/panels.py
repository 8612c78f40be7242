"""The panels that answer: the verdict, the next batch, freshness. Functions of the view, as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console
from rich.text import Text

from agentrl.runtime.status import Status
from agentrl.tui.advice import Advice, slowest
from agentrl.tui.draw import (
    BAD,
    DIM,
    FAIR,
    GOOD,
    STRONG,
    Cell,
    bar,
    columns,
    count,
    counted,
    ends,
    fit,
    level,
    line,
    percent,
    spark,
    ticks,
    took,
)


@dataclass
class View:
    """What the panels draw: the newest picture, the bank's filling since the screen opened, and the advice."""

    status: Status
    bank: Sequence[int] = ()
    advice: list[Advice] = field(default_factory=list)


_PLAIN = Console(width=80, color_system=None)  # only for its rules of folding

Draw = Callable[[View, int, int], list[Text]]


# --- 1: the next batch ------------------------------------------------------------------------------------------------


def trainer_state(status: Status) -> Text:
    """What it does, and for how long."""
    if status.outcome:
        return Text(status.outcome, style=DIM)
    word = {"ready": "TRAINER WAITS", "stepping": "trains", "absent": "no trainer"}[status.trainer]
    style = {"ready": BAD if status.trainer_for_s > 1 else FAIR, "stepping": GOOD, "absent": FAIR}[status.trainer]
    return Text(f"{word} {took(status.trainer_for_s)}", style=style)


def batch(view: View, width: int, height: int) -> list[Text]:
    status = view.status
    share = status.waited_s / status.watched_s if status.watched_s else 0.0
    waits = [s.waited_s / s.interval_s if s.interval_s else 0.0 for s in status.recent]
    idle = line("idle", Text(percent(share), style=level(share, fair=0.15, bad=0.4)), gap=" ")
    head = line(trainer_state(status), idle)
    room = max(0, min(width - head.cell_len - 2, len(waits)))
    ready = line(
        ticks(min(status.bank, status.batch_groups), status.batch_groups, max(4, min(16, width // 4))),
        Text(f"{status.bank}/{status.batch_groups} ready", style=STRONG),
        f"window {status.places_used}/{status.window_groups}" + (" auto" if status.auto_window else ""),
    )
    lines = [line(head, spark(waits, room, top=1.0)), ready]
    missing = max(0, status.batch_groups - status.bank)
    if missing:
        lines += _missing(status, missing, width, height - len(lines))
    if len(lines) < height and len(view.bank) > 1:
        lines.append(line(Text("bank", style=DIM), spark(view.bank, min(40, width - 6), style="green")))
    return lines + _limits(status)[: max(0, height - len(lines))]


def _limits(status: Status) -> list[Text]:
    """What holds W and C, by what is measured: what sets them, or would."""
    would = "" if status.auto_window else "auto would make it: "
    least = [next((limit for limit in status.window_limits if limit.of == of), None) for of in ("W", "C")]
    names = {"W": "window", "C": "conversations"}
    return [
        Text(f"{would}{names[limit.of]} ≤ {limit.value:.0f} ({limit.name}): {limit.said}", style=DIM)
        for limit in least
        if limit is not None
    ]


def _missing(status: Status, missing: int, width: int, room: int) -> list[Text]:
    """The groups that will most likely fill the batch: those that lack fewest siblings."""
    near = sorted((g for g in status.groups if not g.ready), key=lambda g: (g.siblings - g.done, -g.age_s, g.id))
    rows: list[tuple[Cell, ...]] = []
    for group in near[:missing]:
        slow = slowest(group)
        lacks = f"{group.done}/{group.siblings}"
        if slow is None:
            rows.append((f"g{group.id}", lacks, Text("no place", style=DIM), "", "", ""))
        else:
            style = level(slow.for_s / (status.attempt_timeout_s or slow.for_s or 1), fair=0.3, bad=0.7)
            for_s = Text(took(slow.for_s), style=style)
            rows.append((f"g{group.id}", lacks, f"m{slow.index}", for_s, slow.place, slow.host))
    drawn = columns(rows, ("missing", ">done", "slowest", ">for", "engine", "host"), width)
    return drawn if len(drawn) <= room else drawn[1 : room + 1]


# --- 2: freshness -----------------------------------------------------------------------------------------------------


def freshness(view: View, width: int, height: int) -> list[Text]:
    status = view.status
    ages = Counter(status.version - g.oldest for g in status.groups if g.oldest is not None)
    unborn = sum(g.oldest is None for g in status.groups)
    top = max([status.bound, *ages])
    head = line(f"K {status.bound}", f"trainer v{status.version}", f"live v{status.live_version}", status.mode)
    bars = _histogram(ages, top, status.bound, width, max(1, height - 3))
    fresh = f"no token yet: {counted(unborn, 'group')}" if unborn else ""
    more = line(Text(fresh, style=DIM), _dropped(status))
    published = _publication(status, width)
    return [head, *bars, published, more] if height > len(bars) + 2 else [head, *bars, published]


def _histogram(ages: Counter[int], top: int, bound: int, width: int, room: int) -> list[Text]:
    most = max(ages.values(), default=0) or 1
    if top + 1 <= room:
        return [
            line(
                f"age {age}", bar(ages[age] / most, max(4, min(40, width - 14)), _age_style(age, bound)), str(ages[age])
            )
            for age in range(top + 1)
        ]
    cells = max(1, min(top + 1, (width - 6) // 5))
    shown = range(max(0, top + 1 - cells), top + 1)
    marks = Text("").join(
        Text.assemble(" ", spark([ages[a]], 1, top=most, style=_age_style(a, bound)), fit(count(ages[a]), 3))
        if ages[a]
        else Text(" ·   ", style=DIM)
        for a in shown
    )
    names = "".join(f" {a:<4}" for a in shown)
    return [Text.assemble("groups", marks), Text(f"age   {names}", style=DIM)]


def _age_style(age: int, bound: int) -> str:
    return BAD if age > bound else FAIR if age == bound and bound else GOOD


def _publication(status: Status, width: int) -> Text:
    """Which version each engine holds, what is on its way; of many, how many hold each version."""
    parts = []
    for e in status.engines:
        behind = e.version < status.version
        mark = "✓" if not behind else "…" if "v" in e.phase else "·"
        parts.append(Text(f"{e.name} v{e.version}{mark}", style=GOOD if not behind else FAIR))
    drawn = line(*parts) if parts else Text("no engine", style=BAD)
    if drawn.cell_len <= width:
        return drawn
    held = Counter(e.version for e in status.engines)
    counted = (
        Text(f"{held[v]} at v{v}{'✓' if v >= status.version else '…'}", style=GOOD if v >= status.version else FAIR)
        for v in sorted(held, reverse=True)
    )
    return line(f"{len(status.engines)} engines:", *counted)


def _dropped(status: Status) -> Text:
    dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(status.dropped.items()) if n)
    return Text(f"dropped: {dropped}", style=FAIR) if dropped else Text("")


# --- the top of the screen --------------------------------------------------------------------------------------------


def verdict(view: View, width: int, height: int) -> list[Text]:
    """Is the trainer waiting, why, and what to do: the first advice, or that there is none."""
    status = view.status
    if not view.advice:
        calm = _folded(line(trainer_state(status), _calm(status)), width, height - 1)
        return [*calm, *_folded(Text(_pace(status), style=DIM), width, height - len(calm))]
    first = view.advice[0]
    mark = Text("▲", style=BAD) if first.alarm else Text("●", style=FAIR)
    why = _folded(line(line(mark, trainer_state(status), gap=" "), first.saw), width, height - 1)
    more = Text(f"+{len(view.advice) - 1} below" if len(view.advice) > 1 else "", style=DIM)
    *most, last = _folded(_remedy(first), width - more.cell_len - 1, height - len(why))
    return [*why, *most, ends(last, more, width)]


def _calm(status: Status) -> str:
    if status.outcome:
        return "" if status.outcome in ("done", "drained") else status.blockers
    return "nothing to change" if status.trainer == "stepping" else status.blockers


def _remedy(advice: Advice) -> Text:
    """The recipe's keys, and what to do: keys first, as they must not be cut."""
    return line(line(Text("→", style=STRONG), Text(advice.key, style="cyan"), gap=" "), advice.change)


def _pace(status: Status) -> str:
    """What is on its way, and the usual pace."""
    behind = [e for e in status.engines if e.version < status.version]
    parts = []
    if behind and not status.outcome:
        moving = ", ".join(f"{e.name} {e.phase.split()[0]}" for e in behind if e.phase != "serving")
        have = f"v{status.version} on {len(status.engines) - len(behind)} of {len(status.engines)} engines"
        parts.append(f"{have}: {moving}" if moving else have)
    steps = status.recent[-20:]
    if steps:
        interval, waited = fmean(s.interval_s for s in steps), fmean(s.waited_s for s in steps)
        parts.append(f"lately a batch every {took(interval)}, the trainer waiting {took(waited)} of it")
    return "; ".join(parts)


def _folded(text: Text, width: int, height: int) -> list[Text]:
    """At word ends, into at most `height` lines."""
    lines = list(text.wrap(_PLAIN, max(1, width)))
    if len(lines) <= height:
        return lines
    kept = lines[: max(1, height)]
    kept[-1] = fit(Text.assemble(kept[-1], "…"), width)
    return kept


def advice_lines(found: Sequence[Advice]) -> list[Text]:
    """All of it, for the log."""
    drawn = []
    for each in found:
        mark = ("▲ ", BAD) if each.alarm else ("● ", FAIR)
        drawn.append(Text.assemble(mark, each.saw))
        drawn.append(line("", _remedy(each)))
    return drawn
