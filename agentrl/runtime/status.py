"""What people look at: one immutable picture of a run. `top`, `/v1/status` and the progress lines draw this."""

from __future__ import annotations

from agentrl.records import GroupId, Record, TaskId, Version
from agentrl.scheduler import publication
from agentrl.scheduler.core import Core
from agentrl.scheduler.groups import Group, Phase


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


def picture(core: Core, now: float) -> Status:
    policy, ledger = core.policy, core.ledger
    engines = core.router.engines
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
        window_groups=policy.window_groups,
        attempts=len(core.table.running),
        window_attempts=policy.window_attempts,
        live_version=publication.live_version(engines.values(), core.version),
        paused=core.paused,
        draining=core.draining,
        admitted=ledger.admitted,
        trained=ledger.trained,
        dropped=dict(ledger.dropped),
        retried=ledger.retried,
        restarted=ledger.restarted,
        late=ledger.late,
        engines=tuple(_engine(core, name) for name in sorted(engines)),
        groups=tuple(_group(group, policy.siblings, now) for group in core.table.groups.values()),
        hosts={host: core.host_load[host] for host in core.hosts},
        blockers=core.blockers(now),
    )


def _engine(core: Core, name: str) -> EngineStatus:
    engine = core.router.engines[name]
    loads = [rank.load for rank in engine.ranks if rank.load is not None]
    phase = "serving" if engine.admitted else "catching up"
    if engine.swapping is not None:
        phase = f"swapping to v{engine.swapping}"
    elif engine.staging is not None:
        phase = f"staging v{engine.staging}"
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
    )
