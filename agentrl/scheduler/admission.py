"""Which waiting sibling starts first. A key per group, least first; ties end in the group's ticket.

fifo            the oldest group (no key: the table's own order)
frontier        the group that lacks fewest siblings: the next batch forms earliest (RolloutPipe, arXiv 2606.26997)
shortest-group  the group with least remaining work, but none waits for ever: one that is `_PATIENCE` mean group times
                old goes first (WAR, arXiv 2607.17299)
longest-first   the group with the longest conversations, so that the tail begins early (Heddle, arXiv 2603.28101)
expiry          the group with fewest versions left until it is stale, then least remaining work

Remaining work is estimated from the group's own finished siblings (difficulty is shared within a group), else from the
running mean of all.
"""

from __future__ import annotations

from collections.abc import Callable

from agentrl.scheduler.groups import Group, Phase
from agentrl.scheduler.state import State

_PATIENCE = 4.0

Key = Callable[[Group], tuple[float, ...]]


def key_of(state: State, now: float) -> Key | None:
    """The policy's key, None for plain order of tickets."""
    match state.policy.admission:
        case "frontier":
            return lambda group: (_lacking(state, group),)
        case "shortest-group":
            patience = _PATIENCE * max(state.mean_group_s, 1e-9)
            return lambda group: (float(now - group.admitted < patience), remaining(state, group))
        case "longest-first":
            return lambda group: (-length(state, group),)
        case "expiry":
            return lambda group: (_versions_left(state, group), remaining(state, group))
        case _:
            return None


def length(state: State, group: Group) -> float:
    """Expected tokens of one more conversation of this group."""
    done = [m.facts.tokens for m in group.members if m.facts is not None]
    return sum(done) / len(done) if done else state.router.costs.tokens


def remaining(state: State, group: Group) -> float:
    """Expected tokens until the group is complete."""
    return _lacking(state, group) * length(state, group)


def _lacking(state: State, group: Group) -> float:
    running = sum(m.phase is Phase.RUNNING for m in group.members)
    return state.policy.siblings - len(group.done) - running / 2  # those that run are half done, on average


def _versions_left(state: State, group: Group) -> float:
    floor = group.floor
    return float("inf") if floor is None else float(floor + state.policy.bound - state.version)
