"""What to do about it: pictures of a run in, advice out. Pure.

Alarms first (who blocks the batch, and for how long); hints on tuning only while no alarm is on. Each says what it saw,
with the figure, and what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median

from agentrl.records import Lane, LaneStatus, Record
from agentrl.runtime.status import DownStatus, EngineStatus, GroupStatus, MemberStatus, Status

_STEPS = 5  # cut batches before tuning is spoken of
_LOOK_BACK = 20  # steps that a hint is drawn from
_PATIENCE_S = 10.0  # below this nothing is an alarm, whatever the usual pace
_SLOW = 3.0  # so many times the usual duration is no longer usual
_IDLE, _BUSY = 0.15, 0.03  # share of the trainer's time spent waiting: above is worth a change, below is none
_LANE_WAIT_S = 1.0
_LANE_SHARE = 0.25  # of the conversations: so many in one lane's queue are what the batch waits for
_USUAL = 30  # pictures, a second apart, that tell what is usual: a hint that comes and goes helps nobody
_KV = 0.9
_SHORT = 0.9
_STALE = 0.05
_LAG_S = 0.5  # that the run's event loop is late: noticeable beside a turn
_AGAIN = "it is started again until its restarts are spent"


class Advice(Record):
    """alarm: something blocks now; else a hint. key: the recipe's, empty where no key helps."""

    name: str
    alarm: bool
    saw: str
    change: str
    key: str = ""


def advise(history: Sequence[Status]) -> list[Advice]:
    """history: pictures of one run, oldest first, the newest last; earlier ones may lack their groups. The most
    telling advice first."""
    if not history or history[-1].outcome:
        return []
    found = list(_alarms(history))
    return found or list(_hints(history))


# --- alarms -----------------------------------------------------------------------------------------------------------


def _alarms(history: Sequence[Status]) -> Iterator[Advice]:
    status = history[-1]
    yield from _halted(status)
    yield from _fallen(status)
    yield from _failing(status)
    yield from _late_loop(status)
    yield from _trainer(status)
    yield from _stuck_engines(history)
    yield from _straggler(status)
    yield from _quiet(status)


def _alarm(name: str, saw: str, change: str, key: str = "") -> Advice:
    return Advice(name=name, alarm=True, saw=saw, change=change, key=key)


def _halted(status: Status) -> Iterator[Advice]:
    if status.draining:
        yield _alarm("draining", "the run drains and will end", "to go on: the same `agentrl run` with its --run-dir")
    elif status.paused:
        yield _alarm("paused", "the run is paused: nothing new starts, no batch is cut", "press p to go on")


def _fallen(status: Status) -> Iterator[Advice]:
    for machine in dict.fromkeys(gone.link for gone in status.down if gone.link):
        yield _unreachable(machine, status)
    for gone in status.down:
        if gone.link:
            continue
        saw = f"{gone.kind} {gone.name} is down for {status.now_s - gone.at_s:.0f} s: {gone.reason}"
        if gone.kind == "engine":
            yield _alarm("engine-down", saw, f"{_AGAIN}; see logs/{gone.name}.log", "engines.restarts")
        else:
            other = "its attempts go on elsewhere" if status.hosts else "its attempts wait for it"
            yield _alarm("host-down", saw, f"{other}; {_AGAIN}; see logs/", "sandbox.restarts")


def _unreachable(machine: str, status: Status) -> Advice:
    lost = [gone for gone in status.down if gone.link == machine]
    engines = ", ".join(gone.name for gone in lost if gone.kind == "engine")
    what = " and ".join(
        filter(None, (f"engines {engines}" if engines else "", "its sandboxes" if _boxes(lost) else ""))
    )
    since = min(gone.at_s for gone in lost)
    saw = f"host {machine} cannot be reached for {status.now_s - since:.0f} s ({what}): {lost[0].reason}"
    return _alarm(
        "link-down", saw, "the run goes on without it and takes it back; try `agentrl doctor RECIPE`", "hosts.address"
    )


def _boxes(lost: Sequence[DownStatus]) -> bool:
    return any(gone.kind == "sandbox host" for gone in lost)


def _failing(status: Status) -> Iterator[Advice]:
    if status.failing >= 3:
        saw = f"{status.failing} attempts failed in a row, the last one {status.last_fault}"
        yield _alarm(
            "failing", saw, "see the log of what it names; after its retries a sibling is lost", "schedule.retries"
        )


def _late_loop(status: Status) -> Iterator[Advice]:
    if status.loop_lag_s > _LAG_S:
        saw = f"the run's own event loop is up to {status.loop_lag_s:.1f} s late: every conversation waits for it"
        change = "leave `agentrl run` a CPU of its own, or fewer conversations"
        yield _alarm("loop-lag", saw, change, "sandbox.serving_cpus, window.attempts")


def _trainer(status: Status) -> Iterator[Advice]:
    steps = [s.train_s for s in status.recent if s.train_s > 0]
    usual, waited = median(steps) if steps else 0.0, status.trainer_for_s
    if status.trainer == "stepping" and steps and waited > max(2 * _PATIENCE_S, _SLOW * usual):
        saw = f"the trainer is at its step for {waited:.0f} s; usually it takes {usual:.1f} s"
        yield _alarm(
            "trainer-slow",
            saw,
            "see logs/trainer.log; one that is silent for longer loses its batch",
            "train.step_timeout_s",
        )
    elif status.trainer == "absent" and status.bank >= status.batch_groups and waited > _PATIENCE_S:
        saw = f"a batch is ready and no trainer has asked for {waited:.0f} s"
        yield _alarm(
            "trainer-absent", saw, "it may be starting: see logs/trainer.log; or: agentrl train RECIPE --attach RUN"
        )


def _stuck_engines(history: Sequence[Status]) -> Iterator[Advice]:
    for engine in history[-1].engines:
        if engine.phase == "serving" and engine.version >= history[-1].version:
            continue
        if (since := _in_phase_for(history, engine)) > 6 * _PATIENCE_S and engine.phase != "serving":
            saw = f"engine {engine.name} (v{engine.version}) has been {engine.phase} for {since:.0f} s"
            yield _alarm(
                "engine-stuck",
                saw,
                f"see logs/{engine.name}.log; each of its calls has a limit",
                "engines.admin_timeout_s",
            )


def _in_phase_for(history: Sequence[Status], engine: EngineStatus) -> float:
    """How long `engine` has been in the phase that it is in now, as far as the pictures go back."""
    since = history[-1].now_s
    for earlier in reversed(history):
        then = {e.name: e.phase for e in earlier.engines}
        if then.get(engine.name) != engine.phase:
            break
        since = earlier.now_s
    return history[-1].now_s - since


def _straggler(status: Status) -> Iterator[Advice]:
    """The trainer waits for one sibling of a group that is otherwise done."""
    if status.trainer != "ready" or status.bank >= status.batch_groups or status.trainer_for_s < _patience(status):
        return
    for group, member in _last_ones(status)[: status.batch_groups - status.bank]:
        others = [m.engine_s + m.tool_s for m in group.members if m.phase == "done"]
        usual = median(others) if others else 0.0
        if member.for_s > max(_PATIENCE_S, _SLOW * usual):
            saw = (
                f"{status.bank} of {status.batch_groups} groups are ready; {attempt_name(group, member)}"
                f" runs {member.for_s:.0f} s on engine {member.place}, sandbox host {member.host};"
                f" its {group.done} siblings took {usual:.0f} s"
            )
            limit = f"spares, or a limit below {status.attempt_timeout_s:.0f} s"
            yield _alarm("straggler", saw, limit, "batch.spare, schedule.attempt_timeout_s")
            return


def _last_ones(status: Status) -> list[tuple[GroupStatus, MemberStatus]]:
    """Groups that lack fewest siblings, each with the running one that began first."""
    near = [g for g in status.groups if not g.ready and g.done >= max(1, g.siblings // 2) and g.running]
    near.sort(key=lambda g: (g.siblings - g.done, -g.age_s, g.id))
    return [(g, slow) for g in near if (slow := slowest(g)) is not None]


def _quiet(status: Status) -> Iterator[Advice]:
    if status.stall_s and not status.paused and status.quiet_s > max(_PATIENCE_S, status.stall_s / 2):
        saw = f"nothing has moved for {status.quiet_s:.0f} s: {status.blockers}"
        yield _alarm(
            "quiet", saw, f"see logs/; at {status.stall_s:.0f} s the run ends, exit code 4", "schedule.stall_s"
        )


def _patience(status: Status) -> float:
    intervals = [s.interval_s for s in status.recent]
    return max(_PATIENCE_S, 0.5 * median(intervals)) if intervals else _PATIENCE_S


def slowest(group: GroupStatus) -> MemberStatus | None:
    running = [m for m in group.members if m.phase == "running"]
    return max(running, key=lambda m: (m.for_s, -m.index), default=None)


def attempt_name(group: GroupStatus, member: MemberStatus) -> str:
    return f"g{group.id}.m{member.index}.t{max(0, member.tries - 1)}"


# --- hints ------------------------------------------------------------------------------------------------------------


def _hints(history: Sequence[Status]) -> Iterator[Advice]:
    status = history[-1]
    if len(status.recent) < _STEPS:
        return
    yield from _memory(status)
    lanes = list(_lanes(history))
    yield from lanes
    yield from _ages(status)
    yield from _bias(status)
    yield from _pace(history, lanes=bool(lanes))


def _usual(history: Sequence[Status], of: Callable[[Status], float]) -> int:
    return round(median(of(status) for status in history[-_USUAL:]))


def _hint(name: str, saw: str, change: str, key: str) -> Advice:
    return Advice(name=name, alarm=False, saw=saw, change=change, key=key)


def idle_share(status: Status) -> float:
    """Of the recent steps: the trainer's waits over the time between the cuts. The first batch fills an empty run."""
    steps = [step for step in status.recent if step.batch > 0][-_LOOK_BACK:]
    whole = sum(s.interval_s for s in steps)
    return sum(s.waited_s for s in steps) / whole if whole else 0.0


def _pace(history: Sequence[Status], *, lanes: bool) -> Iterator[Advice]:
    """Who is the bottleneck: the window, the conversations in flight, the engines, or the trainer. lanes: it is one of
    the sandboxes, and more conversations would only wait there."""
    status = history[-1]
    idle, slots = idle_share(status), _slots(status)
    running, attempts = _usual(history, _running), _usual(history, lambda s: s.attempts)
    if idle > _IDLE:
        saw = f"{_waited(status)}, and"
        if slots and running >= 0.95 * slots:
            more = f"{saw} the engines are full ({running} of {slots} slots)"
            yield _hint("engine-bound", more, "add engines or slots", "engines.count, engines.slots")
        elif lanes or status.auto_window:  # more would only queue there, or is measured already
            return
        elif attempts >= status.window_attempts:
            more = f"{saw} all {status.window_attempts} conversations are in flight, {running} of {slots} slots decode"
            yield _hint("attempts-bound", more, "allow more conversations", "window.attempts")
        elif _usual(history, lambda s: s.places_used) >= status.window_groups and _oldest_age(status) < status.bound:
            more = f"{saw} the window is full ({status.window_groups} groups)"
            measured = _measured(status)
            if measured is None or measured > status.window_groups:  # else more groups would only take turns
                yield _hint("widen", more, "widen the window" + _could_be(status), "window.groups")
    elif idle < _BUSY and status.bank >= status.batch_groups:
        saw = f"the trainer waited {100 * idle:.0f} %; {status.bank} groups are ready, a batch takes"
        more = f"{saw} {status.batch_groups}"
        if not status.auto_window and status.bank >= 2 * status.batch_groups and _oldest_age(status) > 1:
            change = "narrow the window" + _could_be(status)
            yield _hint("narrow", f"{more}: they age in the bank", change, "window.groups")
        else:
            change = "the trainer is the bottleneck: give it more threads or devices, or take engines away"
            yield _hint("trainer-bound", more, change, "train.threads, train.micro_tokens")


def _measured(status: Status) -> int | None:
    """Groups that the window would have by what was measured; None before that."""
    return next((round(limit.value) for limit in status.window_limits if limit.of == "W"), None)


def _could_be(status: Status) -> str:
    measured = _measured(status)
    return "" if measured is None else f' ("auto" would make it {measured})'


def _waited(status: Status) -> str:
    return f"the trainer waited {100 * idle_share(status):.0f} % of the last {len(status.recent[-_LOOK_BACK:])} steps"


def _running(status: Status) -> int:
    return sum(engine.running for engine in status.engines)


def _slots(status: Status) -> int:
    return sum(e.slots for e in status.engines)


def _oldest_age(status: Status) -> int:
    """Largest age in the recent batches."""
    return max((age for s in status.recent[-_LOOK_BACK:] for age, _ in s.ages), default=0)


def _memory(status: Status) -> Iterator[Advice]:
    """Of the rank whose KV cache is fullest: each has its own."""
    full = [
        (rank.kv_used_tokens / rank.kv_total_tokens, f"{engine.name}/{rank.rank}", rank.waiting)
        for engine in status.engines
        for rank in engine.ranks
        if rank.waiting and rank.kv_used_tokens > _KV * rank.kv_total_tokens > 0
    ]
    if full:
        share, name, waiting = max(full)
        saw = f"engine {name}: the KV cache is {100 * share:.0f} % full and {waiting} requests wait"
        yield _hint("kv", saw, "fewer conversations, or more KV capacity", "window.attempts, engines.kv_tokens")


def _lanes(history: Sequence[Status]) -> Iterator[Advice]:
    """Lanes whose waits are long; else the one that most conversations wait for, while the trainer waits for them."""
    status, slow = history[-1], False
    for host in status.sandboxes:
        for lane in host.lanes:
            if lane.queued and lane.running >= lane.cap and lane.wait_s_mean > _LANE_WAIT_S:
                slow = True
                yield _lane_hint(_lane(host.name, lane), lane.lane)
    if slow or idle_share(status) <= _IDLE:
        return
    queues = {
        lane.lane: _usual(history, partial(_queued, lane.lane)) for host in status.sandboxes for lane in host.lanes
    }
    longest = max(queues, key=lambda lane: queues[lane], default=None)
    attempts = _usual(history, lambda s: s.attempts)
    if longest is not None and queues[longest] > _LANE_SHARE * attempts:
        yield _lane_hint(
            f"{_waited(status)}, and {queues[longest]} of {attempts} conversations queue for lane {longest}", longest
        )


def _queued(lane: Lane, status: Status) -> int:
    """Of all hosts."""
    return sum(each.queued for host in status.sandboxes for each in host.lanes if each.lane == lane)


def _lane_hint(saw: str, lane: Lane) -> Advice:
    return _hint("lane", saw, "raise its cap, or give it CPUs", f"sandbox.lanes.{lane}")


def _lane(host: str, lane: LaneStatus) -> str:
    return (
        f"lane {lane.lane} on {host}: all {lane.cap} places in use, {lane.queued} wait,"
        f" {lane.wait_s_mean:.1f} s each on {len(lane.cpus)} CPUs"
    )


def _ages(status: Status) -> Iterator[Advice]:
    stale = status.dropped.get("stale", 0)
    if status.admitted and stale > _STALE * status.admitted:
        saw = f"{stale} of {status.admitted} groups were dropped as stale"
        yield _hint(
            "stale", saw, "let the cut wait or mask old tokens, or allow more age", "freshness.when_stale, freshness.K"
        )
    oldest = [max(age for age, _ in s.ages) for s in status.recent[-_LOOK_BACK:] if s.ages]
    if not status.auto_window and status.bound and oldest and fmean(oldest) > status.bound - 0.5:
        saw = f"the oldest group of a batch is {fmean(oldest):.1f} versions old on average; K is {status.bound}"
        yield _hint("near-K", saw, "narrow the window, or allow more age", "window.groups, freshness.K")


def _bias(status: Status) -> Iterator[Advice]:
    if status.length_ratio is not None and status.length_ratio < _SHORT:
        saw = f"trained trajectories have {status.length_ratio:.2f} of the length of completed ones"
        yield _hint("short-bias", saw, "long work expires: let the cut wait for it", "freshness.when_stale")
