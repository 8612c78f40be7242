"""Recorded attempts as JSON lines: written from a live run's turns or from a workload, replayed as a workload.

One line is one attempt: {"group", "member", "plan"}, plan as in `ops.AttemptPlan` (arrays in field order). What was
recorded is the whole of it: lengths, operations and their durations; engines and hosts are the simulation's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import msgspec

from agentrl.errors import DataError
from agentrl.records import Lane, Record, Stop, Turn, Verdict
from agentrl.sim.fleet.ops import AttemptPlan, Op, Plans, TurnPlan


class Line(Record):
    group: str
    member: int
    plan: AttemptPlan


class Trace:
    """`Plans` of what was recorded. A group is asked for by its name; `groups` lists them in the order of the file."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._plans: dict[tuple[str, int], AttemptPlan] = {(line.group, line.member): line.plan for line in lines}
        self.groups = tuple(dict.fromkeys(group for group, _ in self._plans))

    @classmethod
    def load(cls, path: Path) -> Trace:
        """DataError with the line's number where the file is not a trace."""
        decoder = msgspec.json.Decoder(Line)
        lines = []
        for number, text in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                lines.append(decoder.decode(text))
            except msgspec.DecodeError as exc:
                raise DataError(f"{path}:{number}: not an attempt of a trace: {exc}", hint="record it again") from exc
        return cls(lines)

    def plan(self, group: str, member: int) -> AttemptPlan:
        try:
            return self._plans[group, member]
        except KeyError:
            raise DataError(
                f"the trace has no member {member} of group {group}",
                hint="simulate no more groups and siblings than were recorded",
            ) from None


class Again:
    """`Plans` of a trace without end: recorded groups as they were, and any other is one of them, drawn by the seed."""

    def __init__(self, trace: Trace, seed: int) -> None:
        self._trace = trace
        self._seed = seed
        self._known = frozenset(trace.groups)

    def plan(self, group: str, member: int) -> AttemptPlan:
        if group not in self._known:
            group = self._trace.groups[Random(f"{self._seed}/{group}").randrange(len(self._trace.groups))]
        return self._trace.plan(group, member)


def write(path: Path, lines: Iterable[Line]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def sampled(plans: Plans, groups: Sequence[str], members: int) -> list[Line]:
    """What a workload would do, as a trace."""
    return [Line(group=group, member=m, plan=plans.plan(group, m)) for group in groups for m in range(members)]


def plan_of(
    turns: Sequence[Turn], verdict: Verdict, stop: Stop, *, cpu_share: float = 1.0, reset_s: float = 0.1
) -> AttemptPlan:
    """A live attempt as a plan. A live run measures how long an operation ran, not what it did meanwhile: `cpu_share`
    of it counts as CPU work, the rest as waiting. reset_s: opening and closing of its sandbox, likewise.
    """

    def op(lane: Lane, seconds: float) -> Op:
        return Op(lane, cpu_share * seconds, (1 - cpu_share) * seconds)

    return AttemptPlan(
        opening=turns[0].start,
        turns=tuple(
            TurnPlan(
                turn.end - turn.start,
                turn.observed_end - turn.end,
                None if turn.command is None else op(turn.lane or Lane.COMMAND, turn.tool_s),
            )
            for turn in turns
        ),
        stop=stop,
        reward=verdict.reward or 0.0,
        reset=op(Lane.RESET, reset_s),
        verify=op(Lane.VERIFY, verdict.verify_s),
        cleanup=op(Lane.CLEANUP, reset_s),
    )
