"""What one attempt will do, decided before it starts: the workload's words."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from agentrl.records import Lane, Stop


class Op(NamedTuple):
    """One operation in a sandbox. cpu_s: CPU seconds; wait_s: seconds without CPU; width: most CPUs it uses at once."""

    lane: Lane
    cpu_s: float
    wait_s: float = 0.0
    width: float = 1.0


class TurnPlan(NamedTuple):
    """Tokens that the model samples, tokens of the observation that follows, and the operation between the two."""

    new_tokens: int
    observed_tokens: int = 0
    op: Op | None = None


class AttemptPlan(NamedTuple):
    """opening: prompt tokens of the first turn, the same for all siblings."""

    opening: int
    turns: tuple[TurnPlan, ...]
    stop: Stop
    reward: float
    reset: Op
    verify: Op
    cleanup: Op

    @property
    def stream(self) -> int:
        """Tokens after the opening."""
        return sum(turn.new_tokens + turn.observed_tokens for turn in self.turns)


class Plans(Protocol):
    """Where attempts come from: a seeded workload or a recorded trace. Pure in (group, member)."""

    def plan(self, group: str, member: int) -> AttemptPlan: ...
