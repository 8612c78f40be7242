"""The table of groups, and what is inside one: its attempts, and one attempt's turns with their times as bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from agentrl.records import Turn
from agentrl.runtime.status import GroupStatus, Life, MemberStatus, Status
from agentrl.tui.advice import attempt_name, slowest
from agentrl.tui.draw import BAD, DIM, FAIR, GOOD, Cell, bar, columns, count, line, ticks, took

SORTS: dict[str, Callable[[GroupStatus], tuple[float, ...]]] = {
    "what is missing": lambda g: (g.ready, g.siblings - g.done, -g.age_s, g.id),
    "order": lambda g: (g.id,),
    "age": lambda g: (-g.age_s, g.id),
    "oldest token": lambda g: (float("inf") if g.oldest is None else float(g.oldest), g.id),
    "slowest sibling": lambda g: (-(m.for_s if (m := slowest(g)) else -1.0), g.id),
}

PARTS = {
    "queue": "yellow",
    "prefill": "cyan",
    "decode": "green",
    "wait": "red",
    "tool, open, verify": "blue",
    "for its batch": "white",
}
_LIFE = (("in the engine", "green"), ("in the sandbox", "blue"), ("so far", "cyan"))


def chosen(status: Status, sort: str, pattern: str) -> list[GroupStatus]:
    """Those that the pattern is found in (id, task, engine, host), sorted."""
    found = [g for g in status.groups if not pattern or pattern in _words(g)]
    return sorted(found, key=SORTS[sort])


def _words(group: GroupStatus) -> str:
    places = {word for m in group.members if m.phase == "running" for word in (m.place, m.host)}
    return " ".join((f"g{group.id}", str(group.task), "ready" if group.ready else "", *sorted(places))).lower()


def table(status: Status, groups: Sequence[GroupStatus], width: int) -> list[Text]:
    """A heading and one line each."""
    names = ("group", "task", ">open", "done", ">age", "slowest sibling, where, for how long")
    return columns([_row(status, group, width) for group in groups], names, width)


def _row(status: Status, group: GroupStatus, width: int) -> list[Cell]:
    age = "" if group.oldest is None else str(status.version - group.oldest)
    over = group.oldest is not None and status.version - group.oldest >= max(1, status.bound)
    done: Cell = Text.assemble(
        ticks(group.done, group.siblings, 8 if width < 100 else 16), f" {group.done}/{group.siblings}"
    )
    where: Cell = Text("ready", style=GOOD)
    slow = slowest(group)
    if slow is not None:
        where = line(attempt_name(group, slow), slow.place, slow.host, took(slow.for_s))
    elif not group.ready:
        where = Text("waits for a place", style=DIM)
    task = str(group.task) if len(group.task) <= 24 or width >= 100 else str(group.task)[:23] + "…"
    return [f"g{group.id}", task, took(group.age_s), done, Text(age, style=FAIR if over else ""), where]


def attempts(group: GroupStatus, width: int) -> list[Text]:
    """A legend, a heading, one line for each sibling."""
    legend = line(*(Text(f"█ {name}", style=style) for name, style in _LIFE))
    longest = max((m.for_s if m.phase == "running" else m.engine_s + m.tool_s for m in group.members), default=0.0)
    names = ("attempt", "state", ">time", "", ">turns", ">tokens", ">reward", "ver", "engine", "host")
    return [legend, *columns([_attempt(group, m, longest or 1.0) for m in group.members], names, width)]


def _attempt(group: GroupStatus, member: MemberStatus, longest: float) -> list[Cell]:
    style = {"running": "cyan", "done": GOOD, "lost": BAD}.get(member.phase, DIM)
    if member.phase == "running":
        spent, drawn = member.for_s, bar(member.for_s / longest, 18, "cyan")
    else:
        spent = member.engine_s + member.tool_s
        engine = round(18 * member.engine_s / longest)
        tool = max(0, round(18 * spent / longest) - engine)
        drawn = Text.assemble(("█" * engine, "green"), ("█" * tool, "blue"))
    done = member.phase == "done"
    return [
        attempt_name(group, member),
        Text(member.phase, style=style),
        took(spent) if spent else "",
        drawn,
        str(member.turns) if done else "",
        count(member.tokens) if done else "",
        f"{member.reward:.2f}" if member.reward is not None else "",
        "" if member.oldest is None else f"v{member.oldest}",
        member.place,
        member.host,
    ]


def life(of: Life, waits_s: float, width: int) -> list[Text]:
    """A legend, a heading, one line for the opening, each turn, the verdict and the wait for a batch: a bar of what its
    time went into, and what it did."""
    legend = line(*(Text(f"█ {name}", style=style) for name, style in PARTS.items()))
    parts = [_times(turn) for turn in of.turns]
    opened = {"wait": of.open_wait_s, "tool, open, verify": of.open_s}
    verified = {"wait": of.verify_wait_s, "tool, open, verify": of.verify_s}
    longest = max(sum(each.values()) for each in (*parts, opened, verified)) or 1.0
    wide = max(10, min(40, width - 50))
    rows = [_stage("open", opened, longest, wide)] if any(opened.values()) else []
    rows += [_turn(turn, each, longest, wide) for turn, each in zip(of.turns, parts, strict=True)]
    rows += [_stage("verify", verified, longest, wide)] if of.ended_s is not None else []
    rows += [_stage("batch", {"for its batch": waits_s}, longest, wide)] if waits_s else []
    names = (">turn", ">time", "where the time went", ">tokens", ">cached", "engine", ">exit", "command")
    return [legend, *columns(rows, names, width)]


def _times(turn: Turn) -> dict[str, float]:
    """What the engine does not tell apart is decode."""
    return {
        "queue": turn.queue_s,
        "prefill": turn.prefill_s,
        "decode": max(turn.decode_s, turn.engine_s - turn.queue_s - turn.prefill_s),
        "wait": turn.tool_wait_s,
        "tool, open, verify": turn.tool_s,
    }


def _drawn(times: Mapping[str, float], longest: float, wide: int) -> Text:
    """Not longer than `wide`, however long it took."""
    drawn, so_far = Text(""), 0.0
    for name, seconds in times.items():
        begin, so_far = round(wide * so_far / longest), min(longest, so_far + seconds)
        drawn.append("█" * (round(wide * so_far / longest) - begin), style=PARTS[name])
    return drawn


def _stage(name: str, times: Mapping[str, float], longest: float, wide: int) -> list[Cell]:
    return [Text(name, style=DIM), took(sum(times.values())), _drawn(times, longest, wide), *[""] * 5]


def _turn(turn: Turn, times: Mapping[str, float], longest: float, wide: int) -> list[Cell]:
    exit_code = "" if turn.exit_code is None else str(turn.exit_code)
    did: Cell = " ".join((turn.command or "").split())
    if turn.parse_error:
        did = Text(f"no command: {turn.parse_error}", style=FAIR)
    elif turn.command is None:
        did = Text("submits", style=DIM)
    return [
        str(turn.index),
        took(sum(times.values())),
        _drawn(times, longest, wide),
        str(turn.end - turn.start),
        str(turn.cached_tokens),
        str(turn.place),
        Text(exit_code, style=BAD if exit_code not in ("", "0") else ""),
        did,
    ]
