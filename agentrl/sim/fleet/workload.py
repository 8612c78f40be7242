"""Seeded agent workloads: a pure function of (seed, group, member), one named random stream for each concern.

Lengths and durations are lognormal with capped Pareto tails; a group's difficulty, drawn once, scales the number of
turns of all its members, so that siblings resemble one another more than strangers do.
"""

from __future__ import annotations

import math
from bisect import bisect
from itertools import accumulate
from random import Random

import msgspec

from agentrl.records import Lane, Record, Stop
from agentrl.sim.fleet.ops import AttemptPlan, Op, TurnPlan


class Spread(Record):
    """Lognormal with this median; sigma: standard deviation of the log. cap: largest value."""

    median: float
    sigma: float
    cap: float

    def draw(self, rng: Random, scale: float = 1.0) -> float:
        return min(self.cap, scale * self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)))


class ToolKind(Record):
    """One kind of operation. share: how often, relative to the others. tail: share of operations whose CPU time is
    multiplied by a Pareto variate of this exponent (0: none), capped with the rest."""

    lane: Lane
    share: float
    cpu_s: Spread
    wait_s: Spread = Spread(median=0.0, sigma=0.0, cap=0.0)
    width: float = 1.0
    tail: float = 0.0
    exponent: float = 1.5


class Shape(Record):
    """All that describes a workload. Tokens, seconds. Every number is assumed unless a preset says otherwise."""

    context_tokens: int
    stream_tokens: int  # after the opening
    max_turns: int
    opening: Spread
    turns: Spread  # of one attempt, before limits
    difficulty: float  # sigma of the group's factor on `turns`
    reply: Spread
    observed: Spread
    tools: tuple[ToolKind, ...]
    reset: ToolKind
    verify: ToolKind
    cleanup: ToolKind
    solved: float = 0.5  # mean reward at median difficulty


_COMMAND = ToolKind(lane=Lane.COMMAND, share=0.80, cpu_s=Spread(median=0.3, sigma=1.3, cap=120.0))
_TESTS = ToolKind(
    lane=Lane.COMMAND, share=0.12, cpu_s=Spread(median=6.0, sigma=1.0, cap=600.0), width=2.0, tail=0.05, exponent=1.5
)
_PACKAGE = ToolKind(
    lane=Lane.PACKAGE,
    share=0.08,
    cpu_s=Spread(median=12.0, sigma=0.9, cap=900.0),
    wait_s=Spread(median=6.0, sigma=0.8, cap=180.0),
    width=4.0,
    tail=0.08,
    exponent=1.3,
)

TERMINAL_BENCH = Shape(
    context_tokens=40_960,  # public: the post's Terminal-Bench workload
    stream_tokens=32_768,  # public: same
    max_turns=256,
    opening=Spread(median=2_000, sigma=0.4, cap=8_192),  # cap: context less stream
    # the means multiply to the published stream of about 10.6k tokens a trajectory, observations included
    turns=Spread(median=15.0, sigma=0.45, cap=256),
    difficulty=0.45,
    reply=Spread(median=285, sigma=0.8, cap=8_192),
    observed=Spread(median=130, sigma=1.1, cap=4_096),
    tools=(_COMMAND, _TESTS, _PACKAGE),
    reset=ToolKind(lane=Lane.RESET, share=1, cpu_s=Spread(median=1.0, sigma=0.4, cap=20.0)),
    verify=ToolKind(
        lane=Lane.VERIFY, share=1, cpu_s=Spread(median=6.0, sigma=0.8, cap=300.0), width=2.0, tail=0.03, exponent=1.5
    ),
    cleanup=ToolKind(lane=Lane.CLEANUP, share=1, cpu_s=Spread(median=0.5, sigma=0.3, cap=5.0)),
)

SWE_BENCH = msgspec.structs.replace(
    TERMINAL_BENCH,
    context_tokens=98_304,  # public: the post's SWE-Bench workload
    stream_tokens=90_112,
    max_turns=64,  # public: same
    turns=Spread(median=28.0, sigma=0.4, cap=64),
    difficulty=0.35,
    reply=Spread(median=320, sigma=0.8, cap=8_192),
    observed=Spread(median=350, sigma=1.2, cap=8_192),
    tools=(
        msgspec.structs.replace(_COMMAND, share=0.70),
        msgspec.structs.replace(_TESTS, share=0.24, cpu_s=Spread(median=15.0, sigma=1.2, cap=1_200.0)),
        msgspec.structs.replace(_PACKAGE, share=0.06, cpu_s=Spread(median=25.0, sigma=1.0, cap=1_200.0)),
    ),
    reset=ToolKind(lane=Lane.RESET, share=1, cpu_s=Spread(median=4.0, sigma=0.7, cap=60.0)),
    verify=ToolKind(
        lane=Lane.VERIFY, share=1, cpu_s=Spread(median=30.0, sigma=1.0, cap=1_200.0), width=2.0, tail=0.05, exponent=1.5
    ),
)

PRESETS: dict[str, Shape] = {"terminal-bench": TERMINAL_BENCH, "swe-bench": SWE_BENCH}


class Workload:
    """`Plans` from a seed. Two workloads with equal arguments are equal, whatever the process or the order of calls."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.seed = seed
        self._shares = list(accumulate(kind.share for kind in shape.tools))

    def _stream(self, concern: str, *names: object) -> Random:
        return Random("/".join(map(str, (self.seed, concern, *names))))

    def plan(self, group: str, member: int) -> AttemptPlan:
        shape = self.shape
        shared = self._stream("group", group)
        opening = max(1, int(shape.opening.draw(shared)))
        hardness = shared.gauss(0.0, 1.0)
        words, tools = self._stream("tokens", group, member), self._stream("tools", group, member)
        wanted = shape.turns.draw(words, math.exp(shape.difficulty * hardness))
        turns, stop = self._turns(max(1, round(wanted)), opening, words, tools)
        return AttemptPlan(
            opening=opening,
            turns=turns,
            stop=stop,
            reward=self._reward(group, member, hardness),
            reset=_op(shape.reset, tools),
            verify=_op(shape.verify, tools),
            cleanup=_op(shape.cleanup, tools),
        )

    def _turns(self, wanted: int, opening: int, words: Random, tools: Random) -> tuple[tuple[TurnPlan, ...], Stop]:
        """Turns until the task is done or a limit ends it; the last one has no operation."""
        shape = self.shape
        room = min(shape.stream_tokens, shape.context_tokens - opening)
        turns: list[TurnPlan] = []
        while True:
            reply = max(8, int(shape.reply.draw(words)))
            observed = max(4, int(shape.observed.draw(words)))
            last = len(turns) + 1 >= min(wanted, shape.max_turns)
            full = reply + observed >= room
            if last or full:
                turns.append(TurnPlan(max(1, min(reply, room))))
                limit = Stop.TURN_LIMIT if wanted > shape.max_turns else Stop.SUBMITTED
                return tuple(turns), Stop.CONTEXT_FULL if full and not last else limit
            kind = shape.tools[bisect(self._shares, tools.random() * self._shares[-1])]
            turns.append(TurnPlan(reply, observed, _op(kind, tools)))
            room -= reply + observed

    def _reward(self, group: str, member: int, hardness: float) -> float:
        """Harder groups succeed less; a logistic curve through `solved` at median difficulty."""
        odds = math.log(self.shape.solved / (1 - self.shape.solved)) - hardness
        return float(self._stream("reward", group, member).random() < 1 / (1 + math.exp(-odds)))


def _op(kind: ToolKind, rng: Random) -> Op:
    cpu_s = kind.cpu_s.draw(rng)
    if kind.tail and rng.random() < kind.tail:
        cpu_s = min(kind.cpu_s.cap, cpu_s * rng.paretovariate(kind.exponent))
    wait_s = kind.wait_s.draw(rng) if kind.wait_s.median else 0.0
    return Op(kind.lane, cpu_s, wait_s, kind.width)
