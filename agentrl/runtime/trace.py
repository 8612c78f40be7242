"""A Chrome trace, one event a line, readable at any moment: Perfetto and chrome://tracing accept a missing end.

A process each for attempts (a track for each sibling: its tries, turns and what each turn waited for), the trainer,
publications (a track for each engine), every engine (rows of each rank, counters) and every sandbox host (rows of each
lane, counters). Slices are laid out from durations that whoever spent them measured, anchored at the run's own clock:
the clocks of other machines never meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.records import AttemptId, Lane, RankLoad, TrajectoryFacts, Turn, Version
from agentrl.runtime.moments import Moments
from agentrl.runtime.tracefile import TraceFile
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler import publication
from agentrl.scheduler.core import Core

_SHORT_S = 0.0005  # parts that are shorter draw nothing
_COUNT_EVERY_S = 0.5  # of the run's own counters
_ATTEMPTS, _TRAINER, _PUBLICATIONS = "attempts", "trainer", "publications"


class Trace:
    """The caller closes it. Times in seconds of the run's clock, microseconds in the file."""

    def __init__(self, path: Path) -> None:
        self._file = TraceFile(path)
        self._rows = _Rows()
        self._hosts: dict[AttemptId, str] = {}  # of those that run
        self._seen: dict[AttemptId, tuple[float, float]] = {}  # of the same: first turn's begin, last turn's end
        self._over: dict[AttemptId, float] = {}  # when they ended; until their group is trained or dropped
        self._ready_at: float | None = None
        self._cut: dict[int, tuple[float, tuple[AttemptId, ...]]] = {}
        self._made: dict[Version, float] = {}  # when its step ended; until every engine holds it
        self._counted = (0.0, -1, -1)

    # --- what a turn and an attempt went through --------------------------------------------------------------------

    def turn(self, attempt: AttemptId, turn: Turn, now: float) -> None:
        """now: when the turn was durable, its command included."""
        host = self._hosts.get(attempt, "")
        self._seen[attempt] = self._seen.get(attempt, (turn.began_s, now))[0], now
        engine_end = turn.began_s + turn.engine_s
        self._slice(
            attempt, f"turn {turn.index}", turn.began_s, now, place=str(turn.place), sampled=turn.end - turn.start
        )
        queued = min(engine_end, turn.began_s + turn.queue_s)
        filled = min(engine_end, queued + turn.prefill_s)
        for name, began, ended in (
            ("queue", turn.began_s, queued),
            ("prefill", queued, filled),
            ("decode", filled, engine_end),
        ):
            self._part(attempt, name, began, ended)
        sizes = {"prompt": turn.prompt_tokens, "cached": turn.cached_tokens, "sampled": turn.end - turn.start}
        self._busy(
            f"engine {turn.place.engine}", f"rank {turn.place.rank}", str(attempt), turn.began_s, engine_end, **sizes
        )
        if turn.command is not None and turn.lane is not None:
            began = min(now, engine_end + turn.tool_wait_s)
            self._part(attempt, f"wait: {turn.lane}", engine_end, began)
            self._work(
                attempt, host, turn.lane, "tool", began, min(now, began + turn.tool_s), command=turn.command[:200]
            )

    def _ended(self, facts: TrajectoryFacts, now: float) -> None:
        """The opening lies before the first turn, the verdict after the last, then the sandbox was given back."""
        attempt = facts.attempt
        host, seen = self._hosts.pop(attempt, ""), self._seen.pop(attempt, None)
        self._over[attempt] = now
        if seen is None:
            return  # its turns were those of an earlier process
        opened, turned = seen
        began = opened - facts.open_s
        self._part(attempt, "wait: reset", began - facts.open_wait_s, began)
        self._work(attempt, host, Lane.RESET, "open", began, opened)
        began = min(now, turned + facts.verify_wait_s)
        graded = min(now, began + facts.verify_s)
        self._part(attempt, "wait: verify", turned, began)
        self._work(attempt, host, Lane.VERIFY, f"verify: {facts.reward:g}", began, graded)
        self._part(attempt, "close", graded, now)

    def _stepped(self, event: news.StepFinished, now: float) -> None:
        cut, attempts = self._cut.pop(event.batch, (now, ()))
        self._complete(_TRAINER, "steps", f"step v{event.version}", cut, now, batch=event.batch)
        self._complete(_TRAINER, "steps", "trains", max(cut, now - event.seconds), now)
        for attempt in attempts:
            ended = self._over.pop(attempt, cut)
            self._part(attempt, "waits for its batch", ended, cut)
            self._part(attempt, f"trains v{event.version}", cut, now)

    def weights(self, engine: str, what: str, version: Version, began: float, ended: float, **args: Any) -> None:
        self._complete(_PUBLICATIONS, engine, f"{what} v{version}", began, ended, **args)

    def dispatched(self, moments: Moments) -> None:
        """Each group's time in the bank."""
        for group, ready in moments.ready_s.items():
            if moments.dispatched_s - ready > _SHORT_S:
                self._busy(_TRAINER, "ready", f"g{group}", ready, moments.dispatched_s, batch=moments.batch)

    def live(self, moments: Moments) -> None:
        """From the order to bring its weights until every engine serves them: in rounds later than its step's end."""
        if moments.publish_began_s is not None and moments.live_s is not None:
            self._busy(_PUBLICATIONS, "published", f"v{moments.version}", moments.publish_began_s, moments.live_s)

    def lagged(self, now: float, seconds: float) -> None:
        """How late the run's event loop was, at worst, since it was said last."""
        self._file.counter(_TRAINER, "event loop lag, ms", now, lag=round(1e3 * seconds, 1))

    # --- what the scheduler heard -------------------------------------------------------------------------------------

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        match event:
            case news.EngineLoads():
                for load in event.loads:
                    self._load(event.engine, load, now)
            case news.SandboxHostLoads():
                for lane in event.said.lanes:
                    used = {"running": lane.running, "queued": lane.queued}
                    self._file.counter(f"host {event.host}", f"lane {lane.lane}", now, **used)
            case news.EngineDown():
                self._file.instant(f"engine {event.engine}", f"down: {event.reason}", now)
            case news.SandboxHostDown():
                self._file.instant(f"host {event.host}", f"down: {event.reason}", now)
                for attempt in [attempt for attempt, host in self._hosts.items() if host == event.host]:
                    self._gone(attempt)
            case news.AttemptFailed():
                self._gone(event.attempt)
            case news.AttemptEnded() if event.facts.attempt in self._hosts:
                self._ended(event.facts, now)
            case news.StepFinished() if event.batch in self._cut:
                self._stepped(event, now)
                self._made[event.version] = now
            case _:
                pass
        self._follow(now, commands, core)
        self._publish(now, core)
        self._count(now, core)

    def _follow(self, now: float, commands: Sequence[orders.Command], core: Core) -> None:
        for order in commands:
            match order:
                case orders.StartAttempt():
                    self._hosts[order.attempt] = order.host
                case orders.CancelAttempt():
                    self._gone(order.attempt)
                case orders.DropGroup():
                    for attempt in order.attempts:
                        self._over.pop(attempt, None)
                case orders.TrainOn():
                    self._cut[order.batch] = (now, order.attempts)
                    if self._ready_at is not None:
                        self._complete(_TRAINER, "steps", "waits for a batch", self._ready_at, now)
                case _:
                    pass
        if core.trainer != "ready":
            self._ready_at = None
        elif self._ready_at is None:
            self._ready_at = now

    def _gone(self, attempt: AttemptId) -> None:
        self._hosts.pop(attempt, None)
        self._seen.pop(attempt, None)

    def _publish(self, now: float, core: Core) -> None:
        live = publication.live_version(core.engines, Version(0)) if self._made else Version(0)
        for version in [version for version in self._made if version <= live]:
            began = self._made.pop(version)
            self._complete(_PUBLICATIONS, "until every engine has it", f"v{version}", began, now)

    def _load(self, engine: str, load: RankLoad, now: float) -> None:
        process = f"engine {engine}"
        self._file.counter(process, f"rank {load.rank}: requests", now, running=load.running, waiting=load.waiting)
        if load.kv_total_tokens:
            used = round(100 * load.kv_used_tokens / load.kv_total_tokens, 1)
            self._file.counter(process, f"rank {load.rank}: KV cache, %", now, used=used)

    def _count(self, now: float, core: Core) -> None:
        at, bank, running = self._counted
        found = (len(core.bank), len(core.table.running))
        if found != (bank, running) and (found[0] != bank or now - at >= _COUNT_EVERY_S):
            self._counted = (now, *found)
            self._file.counter(_TRAINER, "ready groups", now, bank=found[0])
            self._file.counter(_TRAINER, "conversations", now, running=found[1])

    def close(self) -> None:
        """Complete the JSON array."""
        self._file.close()

    # --- slices -------------------------------------------------------------------------------------------------------

    def _work(
        self, attempt: AttemptId, host: str, lane: Lane, name: str, began: float, ended: float, **args: Any
    ) -> None:
        """Of the attempt, and in a row of its host's lane."""
        self._part(attempt, name, began, ended, **args)
        if host and ended - began > _SHORT_S:
            self._busy(f"host {host}", str(lane), str(attempt), began, ended)

    def _part(self, attempt: AttemptId, name: str, began: float, ended: float, **args: Any) -> None:
        if ended - began > _SHORT_S:
            self._slice(attempt, name, began, ended, **args)

    def _slice(self, attempt: AttemptId, name: str, began: float, ended: float, **args: Any) -> None:
        """On the track of its member: its tries come one after the other."""
        track = f"g{attempt.group}.m{attempt.member}"
        if attempt.attempt:
            args["try"] = attempt.attempt
        self._file.slice(_ATTEMPTS, track, name, began, ended, args, bulk=True)

    def _busy(self, process: str, what: str, name: str, began: float, ended: float, **args: Any) -> None:
        row = self._rows.place(process, what, began, ended)
        self._file.slice(process, f"{what} .{row:02}", name, began, ended, args, bulk=True)

    def _complete(self, process: str, track: str, name: str, began: float, ended: float, **args: Any) -> None:
        self._file.slice(process, track, name, began, ended, args)


class _Rows:
    """Work that overlaps lies in rows, each free of overlaps: as many as were ever busy at once."""

    def __init__(self) -> None:
        self._busy_until: dict[tuple[str, str], list[float]] = {}

    def place(self, process: str, what: str, began: float, ended: float) -> int:
        """The first row that is free from `began` on. Calls come in order of `ended`, or nearly."""
        rows = self._busy_until.setdefault((process, what), [])
        for row, until in enumerate(rows):
            if until <= began:
                rows[row] = ended
                return row
        rows.append(ended)
        return len(rows) - 1
