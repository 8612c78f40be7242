"""When an attempt is over. A pure function of its turns, so that a resumed attempt ends exactly where it would have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from agentrl.records import Stop, Turn


def stop_after(
    turns: Sequence[Turn], *, max_turns: int, parse_limit: int, agent_timeout_s: float, full: bool
) -> Stop | None:
    """Why no further turn follows `turns`; None where one does. `full`: the next prompt would not fit the context."""
    if not turns:
        return None
    if turns[-1].command is None and not turns[-1].parse_error:
        return Stop.SUBMITTED
    if sum(1 for _ in takewhile(lambda turn: turn.parse_error, reversed(turns))) >= parse_limit:
        return Stop.PARSE_LIMIT
    if len(turns) >= max_turns:
        return Stop.TURN_LIMIT
    if agent_seconds(turns) >= agent_timeout_s:
        return Stop.TIME_LIMIT
    return Stop.CONTEXT_FULL if full else None


def agent_seconds(turns: Sequence[Turn]) -> float:
    """Time the model itself is answerable for: waiting in our queues, lost engines and our restarts are not in it."""
    return sum(turn.engine_s - turn.queue_s + turn.tool_s for turn in turns)
