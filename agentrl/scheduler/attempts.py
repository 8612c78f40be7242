"""The life of a group and its attempts: begun, ended, failed, tried again, dropped. Each function absorbs one fact."""

from __future__ import annotations

from agentrl.records import AttemptId, Blame, Place
from agentrl.scheduler import commands as order
from agentrl.scheduler import events as news
from agentrl.scheduler import freshness
from agentrl.scheduler.groups import Group, Member, Phase
from agentrl.scheduler.state import State

_REST_S = 0.25  # before the first new try of a member, doubled with each further one
_REST_MAX_S = 30.0
NEW_WEIGHTS = "new weights"  # reason of a cancel: `restart` gives up what runs when its engine swaps


def current(state: State, attempt: AttemptId) -> Member | None:
    member = state.table.running.get(attempt)
    if member is None:
        state.ledger.late += 1
    return member


def release(state: State, attempt: AttemptId) -> None:
    """The attempt's slot, place and sandbox are free."""
    member = state.table.forget(attempt)
    if member is not None:
        state.host_load[member.host] -= 1
        state.router.remove(attempt)


def cancel(state: State, attempt: AttemptId, reason: str, *, keep: bool = False) -> None:
    release(state, attempt)
    state.out.append(order.CancelAttempt(attempt=attempt, reason=reason, keep=keep))


def fall_back(state: State, member: Member) -> None:
    """Where conversations are to finish under one version: this one will not. Counted once."""
    if state.policy.in_flight == "finish" and not member.fell_back:
        member.fell_back = True
        state.ledger.fallbacks += 1


def place(state: State, attempt: AttemptId, member: Member, *, history: float | None = None) -> Place | None:
    """Where it goes, None if no engine serves. Under `finish` a conversation that has begun goes on under its version,
    if an engine has it."""
    if state.policy.in_flight == "finish" and member.oldest is not None:
        found = state.router.place(attempt, history=history, version=member.oldest)
        if found is not None:
            return found
        fall_back(state, member)
    return state.router.place(attempt, history=history)


def began(state: State, event: news.AttemptBegan, now: float) -> None:
    """A resumed one begins with what it carries: news of that may have been lost when its place was chosen."""
    member = current(state, event.attempt)
    if member is None:
        return
    state.moved_at = now
    member.oldest = event.oldest
    if member.place is not None and event.oldest != state.router.engines[member.place.engine].version:
        fall_back(state, member)
    refuse_if_stale(state, state.table.groups[event.attempt.group])


def ended(state: State, event: news.AttemptEnded, now: float) -> None:
    attempt = event.facts.attempt
    member = current(state, attempt)
    if member is None:
        return
    release(state, attempt)
    state.moved_at, state.broken = now, 0
    state.ledger.ended += 1
    mixed = len(event.facts.versions) > 1
    state.ledger.mixed += mixed
    state.ledger.unsaid += mixed and state.policy.in_flight == "finish" and not member.fell_back
    state.router.costs.learn(event.facts)
    group = state.table.groups[attempt.group]
    member.phase, member.facts, member.oldest, member.resume = Phase.DONE, event.facts, event.facts.oldest, None
    member.life_s = now - (member.started if member.first is None else member.first)
    state.window.ended(event.facts, member.life_s)
    group.done.append(member.index)
    if len(group.done) == state.policy.siblings:
        complete(state, group, now)
    refuse_if_stale(state, group)


def complete(state: State, group: Group, now: float) -> None:
    for attempt in list(state.table.current(group)):
        cancel(state, attempt, "spare")
    for member in group.members:
        if member.phase is not Phase.DONE:
            member.phase = Phase.SPARED
    group.ready = now
    took = now - group.admitted
    state.mean_group_s = took if not state.ledger.completed else 0.9 * state.mean_group_s + 0.1 * took
    state.ledger.completed += 1
    state.window.completed(group, now)
    state.bank.add(group.id, now)


def failed(state: State, event: news.AttemptFailed, now: float) -> None:
    member = current(state, event.attempt)
    if member is None:
        return
    release(state, event.attempt)
    state.broken += 1
    state.last_fault = f"{event.attempt}: {event.detail}"
    group = state.table.groups[event.attempt.group]
    if event.blame is Blame.TASK:
        state.quarantine.add(group.task)
        drop(state, group, "task")
        return
    member.failures += 1
    try_again(state, group, member, event.attempt if event.resumable else None, now)


def try_again(state: State, group: Group, member: Member, resume: AttemptId | None, now: float) -> None:
    """Back to waiting under a new try, or lost; a group that can no longer be whole is dropped."""
    if member.failures > state.policy.retries:
        member.phase = Phase.LOST
        hopeful = sum(m.phase is not Phase.LOST for m in group.members)
        if hopeful < state.policy.siblings:
            drop(state, group, "failed")
        return
    state.ledger.retried += 1
    state.ledger.restarted += resume is None
    member.resume = resume
    rest = min(_REST_S * 2 ** (member.failures - 1), _REST_MAX_S)
    state.table.wait_again(group, member, now + rest)


def drop(state: State, group: Group, reason: str) -> None:
    for attempt in list(state.table.current(group)):
        cancel(state, attempt, reason)
    state.bank.discard(group.id)
    del state.table.groups[group.id]
    state.ledger.dropped[reason] += 1
    state.round_admitted -= 1
    state.out.append(order.DropGroup(group=group.id, reason=reason, attempts=group.attempts()))


def refuse_if_stale(state: State, group: Group) -> None:
    """Fence 2. Under `mask` only a complete group goes whose every token is too old: nothing of it could train."""
    judged = group.oldest
    if state.policy.when_stale == "mask":
        judged = max(f.versions[-1][0] for f in group.counted()) if group.ready is not None else None
    if judged is not None and freshness.is_stale(state.version, judged, state.policy.bound):
        state.window.aged(group, state.version)
        drop(state, group, "stale")


def interrupt(state: State, attempt: AttemptId, reason: str) -> None:
    """Stop a try through no fault of its own and carry its durable turns over to the next."""
    member = state.table.running[attempt]
    cancel(state, attempt, reason, keep=True)
    member.resume = attempt
    state.table.wait_again(state.table.groups[attempt.group], member)


def start_over(state: State, attempt: AttemptId, reason: str) -> None:
    """Stop a try and begin it anew, carrying nothing: the dearest thing to do with unfinished work. Counted."""
    member = state.table.running[attempt]
    cancel(state, attempt, reason)
    member.resume = None
    state.ledger.restarted += 1
    state.table.wait_again(state.table.groups[attempt.group], member)


def expire(state: State, now: float) -> None:
    state.table.wake(now)
    for attempt in state.table.overdue(now):
        member = state.table.running.get(attempt)
        if member is None:
            continue  # its group was dropped for a sibling's sake just now
        cancel(state, attempt, f"no end after {state.policy.attempt_timeout_s:g} s")
        state.last_fault = f"{attempt}: on {member.place} and {member.host} past its deadline"
        state.broken += 1
        member.failures += 1
        try_again(state, state.table.groups[attempt.group], member, None, now)
