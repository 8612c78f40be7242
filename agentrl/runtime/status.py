"""What people look at: one immutable picture of a run. `top`, `/v1/status` and the progress lines draw this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.records import GroupId, Place, Record, SandboxHostStatus, TaskId, Turn, Version
from agentrl.runtime.recent import DownStatus, Flow, Recent, StepStatus
from agentrl.scheduler import publication
from agentrl.scheduler.core import Core
from agentrl.scheduler.groups import Group, Member, Phase
from agentrl.scheduler.routing import Rank
from agentrl.scheduler.sizing import Limit

__all__ = [
    "DownStatus",
    "EngineStatus",
    "Frame",
    "GroupStatus",
    "Life",
    "MemberStatus",
    "RankStatus",
    "Status",
    "StepStatus",
    "picture",
]


class RankStatus(msgspec.Struct, frozen=True, array_like=True):
    """One data-parallel rank. An array on the wire, as there may be hundreds."""

    rank: int
    conversations: int
    running: int
    waiting: int
    slots: int
    kv_used_tokens: int
    kv_total_tokens: int
    tokens_per_s: float = 0.0
    prefix_reuse: float | None = None


class EngineStatus(Record):
    name: str
    version: Version
    admitted: bool
    phase: str  # serving | staging vN | swapping to vN | catching up
    conversations: int
    running: int
    waiting: int
    slots: int
    kv_used_tokens: int
    kv_total_tokens: int
    tokens_per_s: float = 0.0  # sampled, of attempts that ended lately
    prefix_reuse: float | None = None  # of the same; None where none could be reused
    host: str = ""  # the machine it runs on; empty: the run's own
    ranks: tuple[RankStatus, ...] = ()


class MemberStatus(msgspec.Struct, frozen=True, array_like=True):
    """One sibling. An array on the wire: there may be thousands."""

    index: int
    phase: str  # waiting | running | done | lost | spared
    tries: int
    place: str = ""  # engine/rank, of its last try
    host: str = ""
    for_s: float = 0.0  # how long the running try has run
    oldest: Version | None = None
    tokens: int = 0  # of the transcript; known when it is done
    turns: int = 0
    reward: float | None = None
    engine_s: float = 0.0  # of its life, in the engine
    tool_s: float = 0.0  # and in the sandbox, waiting for a lane included


class GroupStatus(Record):
    id: GroupId
    task: TaskId
    age_s: float
    done: int
    running: int
    siblings: int
    oldest: Version | None
    ready: bool
    slowest: str = ""  # the running attempt that began first
    members: tuple[MemberStatus, ...] = ()


class Status(Record):
    """Times in seconds of the run's clock."""

    now_s: float
    step: int
    steps: int
    version: Version
    bound: int
    trainer: str  # absent | ready | stepping
    bank: int
    batch_groups: int
    places_used: int
    window_groups: int
    attempts: int
    window_attempts: int
    live_version: Version
    paused: bool
    draining: bool
    admitted: int
    trained: int
    dropped: dict[str, int]
    retried: int
    restarted: int
    late: int
    engines: tuple[EngineStatus, ...]
    groups: tuple[GroupStatus, ...]
    hosts: dict[str, int]  # sandboxes in use by host
    blockers: str  # who keeps the next batch from the trainer
    mode: str = "async"
    auto_window: bool = False  # window_groups and window_attempts follow what is measured
    window_limits: tuple[Limit, ...] = ()  # what W and C would be by each, as of the last cut, least first
    when_stale: str = "drop"
    stall_s: float = 0.0  # quiet for so long, the run ends
    quiet_s: float = 0.0  # since anything moved
    attempt_timeout_s: float = 0.0
    failing: int = 0  # attempts that failed in a row
    last_fault: str = ""
    outcome: str = ""  # empty while the run goes on
    trainer_for_s: float = 0.0  # how long the trainer has been what it is
    waited_s: float = 0.0  # that the trainer waited since the first batch, as far as this process has seen
    watched_s: float = 0.0  # since the first batch
    length_ratio: float | None = None  # mean tokens of trained over those of completed trajectories
    recent: tuple[StepStatus, ...] = ()  # the last steps, oldest first
    down: tuple[DownStatus, ...] = ()  # engines and sandbox hosts that went and have not come back
    sandboxes: tuple[SandboxHostStatus, ...] = ()  # what each sandbox host last said of its lanes
    loop_lag_s: float = 0.0  # how late the run's own event loop lately was, at worst; not known of a recording


class Life(Record):
    """One attempt as far as it is durable. Waits are for lanes; all by the sandbox host's own clock."""

    turns: tuple[Turn, ...] = ()
    open_wait_s: float = 0.0
    open_s: float = 0.0
    verify_wait_s: float = 0.0
    verify_s: float = 0.0
    ended_s: float | None = None  # of the run's clock; None while it runs


class Frame(Record):
    """news: what happened since the frame before, {"now", "event", "commands"} each, oldest first. note: what is to be
    said of the connection or the recording, e.g. that the run is over."""

    status: Status
    news: tuple[dict[str, Any], ...] = ()
    note: str = ""


def picture(core: Core, now: float, recent: Recent | None = None, *, loop_lag_s: float = 0.0) -> Status:
    """recent: what only time shows; without it those fields are empty."""
    policy, ledger, seen = core.policy, core.ledger, recent or Recent()
    engines = core.router.engines
    flows = seen.flows(now)
    return Status(
        now_s=now,
        step=core.steps,
        steps=core.target,
        version=core.version,
        bound=policy.bound,
        trainer=core.trainer,
        bank=len(core.bank),
        batch_groups=policy.groups,
        places_used=core.places_used,
        window_groups=core.window.groups,
        attempts=len(core.table.running),
        window_attempts=core.window.attempts,
        live_version=publication.live_version(engines.values(), core.version),
        paused=core.paused,
        draining=core.draining,
        admitted=ledger.admitted,
        trained=ledger.trained,
        dropped=dict(ledger.dropped),
        retried=ledger.retried,
        restarted=ledger.restarted,
        late=ledger.late,
        engines=tuple(_engine(core, name, flows, seen.machines.get(name, "")) for name in sorted(engines)),
        groups=tuple(_group(group, policy.siblings, now) for group in core.table.groups.values()),
        hosts={host: core.host_load[host] for host in core.hosts},
        blockers=core.blockers(now),
        mode=policy.mode,
        auto_window=policy.auto,
        window_limits=core.window.limits,
        when_stale=policy.when_stale,
        stall_s=policy.stall_s,
        quiet_s=max(0.0, now - core.moved_at),
        attempt_timeout_s=policy.attempt_timeout_s,
        failing=core.broken,
        last_fault=core.last_fault,
        outcome=core.finished.outcome if core.finished is not None else "",
        trainer_for_s=seen.trainer_for(now),
        waited_s=seen.waited(now),
        watched_s=seen.watched(now),
        length_ratio=seen.length_ratio,
        recent=tuple(seen.steps),
        down=tuple(seen.down.values()),
        sandboxes=tuple(msgspec.structs.replace(seen.lanes[host], name=host) for host in sorted(seen.lanes)),
        loop_lag_s=loop_lag_s,
    )


def _engine(core: Core, name: str, flows: Mapping[Place, Flow], host: str) -> EngineStatus:
    engine = core.router.engines[name]
    loads = [rank.load for rank in engine.ranks if rank.load is not None]
    phase = "serving" if engine.admitted else "catching up"
    if engine.swapping is not None:
        phase = f"swapping to v{engine.swapping}"
    elif engine.staging is not None:
        phase = f"staging v{engine.staging}"
    ranks = [(rank, flows.get(rank.place, Flow())) for rank in engine.ranks]
    flow = sum((each for _, each in ranks), Flow())
    return EngineStatus(
        name=name,
        version=engine.version,
        admitted=engine.admitted,
        phase=phase,
        conversations=engine.open_work,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        slots=sum(rank.slots for rank in engine.ranks),
        kv_used_tokens=sum(load.kv_used_tokens for load in loads),
        kv_total_tokens=sum(rank.kv_tokens for rank in engine.ranks),
        tokens_per_s=flow.tokens_per_s,
        prefix_reuse=flow.reuse,
        host=host,
        ranks=tuple(_rank(rank, each) for rank, each in ranks),
    )


def _rank(rank: Rank, flow: Flow) -> RankStatus:
    load = rank.load
    return RankStatus(
        rank=rank.place.rank,
        conversations=len(rank.attempts),
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        slots=rank.slots,
        kv_used_tokens=load.kv_used_tokens if load else 0,
        kv_total_tokens=rank.kv_tokens,
        tokens_per_s=flow.tokens_per_s,
        prefix_reuse=flow.reuse,
    )


def _group(group: Group, siblings: int, now: float) -> GroupStatus:
    running = [m for m in group.members if m.phase is Phase.RUNNING]
    slowest = min(running, key=lambda m: m.started, default=None)
    return GroupStatus(
        id=group.id,
        task=group.task,
        age_s=now - group.admitted,
        done=len(group.done),
        running=len(running),
        siblings=siblings,
        oldest=group.oldest,
        ready=group.ready is not None,
        slowest=""
        if slowest is None
        else f"g{group.id}.m{slowest.index}.t{slowest.tries - 1} on {slowest.place} for {now - slowest.started:.0f} s",
        members=tuple(_member(member, now) for member in group.members),
    )


def _member(member: Member, now: float) -> MemberStatus:
    facts = member.facts
    return MemberStatus(
        index=member.index,
        phase=member.phase.value,
        tries=member.tries,
        place=str(member.place or ""),
        host=member.host,
        for_s=round(now - member.started, 3) if member.phase is Phase.RUNNING else 0.0,
        oldest=member.oldest,
        tokens=facts.tokens if facts else 0,
        turns=facts.turns if facts else 0,
        reward=facts.reward if facts else None,
        engine_s=facts.engine_s if facts else 0.0,
        tool_s=facts.tool_s if facts else 0.0,
    )
