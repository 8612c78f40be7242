"""When a batch is cut and which groups it holds: whole groups, in completion order, all fresh.

async       whenever the trainer waits and B groups are ready
pipelined   the same within a round of R groups at fixed weights; the round's weights go out after its last step
sync        only when the whole round is ready

Under `when_stale = wait` the order is oldest tokens first, and the cut waits for groups that could not follow in time:
with fence 1 at admission nothing ever expires (docs/laws.md, law 14).
"""

from __future__ import annotations

from agentrl.records import GroupId, Version
from agentrl.scheduler import commands as order
from agentrl.scheduler import freshness, publication
from agentrl.scheduler.groups import Group
from agentrl.scheduler.state import State


def next_groups(state: State) -> list[GroupId]:
    """The groups of the batch that should be cut now; empty where it is not time."""
    wanted = state.policy.groups
    if len(state.bank) < wanted or (state.policy.mode == "sync" and not _round_is_ready(state)):
        return []
    ready = [group for group, _ in state.bank.items()]
    if state.policy.when_stale == "wait":
        return _oldest_first(state, ready)
    return ready[:wanted]


def _oldest_first(state: State, ready: list[GroupId]) -> list[GroupId]:
    """The B oldest ready groups, if the others can still follow in order of age, B a step, none too old at its turn."""
    live = publication.live_version(state.engines, state.serving)
    floors = {group.id: _no_older(group, live) for group in state.table.groups.values()}
    chosen = sorted(ready, key=floors.__getitem__)[: state.policy.groups]  # stable: ties by completion
    taken = set(chosen)
    left = sorted(floor for group, floor in floors.items() if group not in taken)
    feasible = freshness.can_follow(left, state.policy.groups, state.version + 1, state.policy.bound)
    return chosen if feasible else []


def _no_older(group: Group, live: Version) -> Version:
    """No token that is trained of it will be older. What still runs may be moved to any engine, and a sibling that has
    not begun may begin on any, so only a complete group's own tokens promise more than the oldest version served."""
    floor = live if group.floor is None else group.floor
    return floor if group.ready is not None else min(floor, live)


def _round_is_ready(state: State) -> bool:
    return len(state.bank) + state.round_trained >= state.policy.round_groups


def may_admit(state: State) -> bool:
    """Depth (the window), freshness (fence 1), and in rounds: only while the round is not full."""
    policy = state.policy
    if policy.mode != "async" and state.round_admitted >= policy.round_groups:
        return False
    return state.places_used < state.window.groups and freshness.admits(
        open_groups=len(state.table.groups),
        batch_groups=policy.groups,
        stepping=state.training is not None,
        trainer=state.version,
        live=publication.live_version(state.engines, state.serving),
        bound=policy.bound,
    )


def end_of_step(state: State, groups: int) -> None:
    """Rounds: the last step of one lets its weights out, and the next begins once every engine holds them."""
    state.round_trained += groups
    if state.round_trained >= state.policy.round_groups or state.steps >= state.target:
        state.round_version = state.version


def begin_round(state: State) -> None:
    over = state.round_trained >= state.policy.round_groups > 0
    if over and publication.is_published(state.engines, state.round_version):
        state.round_admitted -= state.round_trained
        state.round_trained = 0


def is_masked(state: State) -> bool:
    return state.policy.when_stale == "mask"


def make(state: State, chosen: list[GroupId]) -> order.TrainOn:
    """The order for these groups; they leave the table."""
    state.bank.take(chosen)
    groups = [state.table.groups.pop(group) for group in chosen]
    for group in groups:
        state.window.aged(group, state.version)
    floor = state.version - state.policy.bound if is_masked(state) else None
    return order.TrainOn(
        batch=state.batches,
        version=state.version,
        bound=state.policy.bound,
        proofs=tuple(freshness.proof(group.id, group.counted(), floor) for group in groups),
        attempts=tuple(facts.attempt for group in groups for facts in group.counted()),
        mask=is_masked(state),
    )
