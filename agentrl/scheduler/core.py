"""The scheduler: one method in, a list of orders out.

    handle(event, now) -> commands     absorb the fact, then apply the rules in one fixed order:
                                       expire -> refuse stale -> fill the batch -> publish -> admit and start -> finish
    next_deadline()                    the earliest moment at which handle(Tick(), now) would matter
    view()                             see snapshot.py

No rule is written here, only their order and what each fact changes. The rules are in bank, freshness, publication,
routing; `laws.py` states what holds after every event.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from agentrl.records import AttemptId, Blame, GroupProof, Place, TaskId, Version
from agentrl.scheduler import commands as order
from agentrl.scheduler import events as news
from agentrl.scheduler import freshness, publication
from agentrl.scheduler.bank import Bank
from agentrl.scheduler.groups import Group, Member, Phase, Table
from agentrl.scheduler.policy import Policy
from agentrl.scheduler.routing import Engine, Rank, Router


@dataclass(slots=True)
class Ledger:
    """Every group admitted ends exactly once. Counts only; the open ones are in the table and in the running batch."""

    admitted: int = 0
    completed: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    started: int = 0
    ended: int = 0
    retried: int = 0
    restarted: int = 0  # retried from the beginning, nothing carried over
    late: int = 0  # news of attempts that are not current


class Core:
    """Single-threaded, deterministic: the same (event, now) sequence gives the same commands."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version = Version(0)  # what the trainer holds
        self.steps = 0
        self.target = policy.steps
        self.table = Table()
        self.bank = Bank()
        self.router = Router()
        self.hosts: dict[str, int] = {}  # sandbox host -> capacity
        self.host_load: Counter[str] = Counter()
        self.ledger = Ledger()
        self.trainer = "absent"  # absent | ready (it waits for a batch) | stepping
        self.ready_ahead = False  # it asked for the next batch before the news that it finished this one
        self.training: order.TrainOn | None = None
        self.held: deque[tuple[Version, int]] = deque()  # places of trained groups whose weights are not live yet
        self.offered: deque[TaskId] = deque()
        self.asked = 0  # tasks asked for and not offered yet
        self.quarantine: set[TaskId] = set()
        self.batches = 0
        self.paused = False
        self.draining = False
        self.finished: order.Finish | None = None
        self.broken = 0  # attempts that failed in a row
        self.last_fault = ""
        self.moved_at = 0.0  # when anything last moved
        self._out: list[order.Command] = []

    # --- the shell ------------------------------------------------------------------------------------------------

    def handle(self, event: news.Event, now: float) -> list[order.Command]:
        if self.finished is not None and not isinstance(event, news.Resumed):
            return []
        self._out = []
        self._absorb(event, now)
        self._expire(now)
        self._fill()
        self._publish()
        self._start(now)
        self._finish(now)
        return self._out

    def next_deadline(self) -> float | None:
        if self.finished is not None:
            return None
        stall = None if self.paused else self.moved_at + self.policy.stall_s
        return min((t for t in (self.table.next_deadline(), stall) if t is not None), default=None)

    # --- facts ----------------------------------------------------------------------------------------------------

    def _absorb(self, event: news.Event, now: float) -> None:
        match event:
            case news.AttemptEnded():
                self._ended(event, now)
            case news.AttemptFailed():
                self._failed(event, now)
            case news.AttemptBegan():
                self._began(event, now)
            case news.Progressed():
                self.moved_at = now
            case news.TaskOffered():
                self.asked = max(0, self.asked - 1)
                self.offered.append(event.task)
            case news.TrainerReady():
                self._trainer_ready(event)
            case news.TrainerDown():
                self.trainer, self.ready_ahead = "absent", False
            case news.StepFinished():
                self._stepped(event, now)
            case news.EngineUp() | news.EngineDown():
                self._engine_changed(event, now)
            case news.EngineLoads() | news.EngineStaged() | news.EngineLoaded() | news.EngineLoadFailed():
                self._engine_said(event, now)
            case news.SandboxHostUp():
                self.hosts[event.host] = event.capacity
                self.moved_at = now
            case news.SandboxHostDown():
                self._host_down(event)
            case news.Resumed():
                self._resumed(event, now)
            case news.PauseAsked():
                self.paused = event.on
                self.moved_at = now
            case news.DrainAsked():
                self._drain()
            case news.Tick():
                pass

    def _current(self, attempt: AttemptId) -> Member | None:
        member = self.table.running.get(attempt)
        if member is None:
            self.ledger.late += 1
        return member

    def _release(self, attempt: AttemptId) -> None:
        """The attempt's slot, place and sandbox are free."""
        member = self.table.forget(attempt)
        if member is not None:
            self.host_load[member.host] -= 1
            self.router.remove(attempt)

    def _cancel(self, attempt: AttemptId, reason: str, *, keep: bool = False) -> None:
        self._release(attempt)
        self._out.append(order.CancelAttempt(attempt=attempt, reason=reason, keep=keep))

    def _began(self, event: news.AttemptBegan, now: float) -> None:
        member = self._current(event.attempt)
        if member is None:
            return
        self.moved_at = now
        member.oldest = event.oldest
        self._refuse_if_stale(self.table.groups[event.attempt.group])

    def _ended(self, event: news.AttemptEnded, now: float) -> None:
        attempt = event.facts.attempt
        member = self._current(attempt)
        if member is None:
            return
        self._release(attempt)
        self.moved_at, self.broken = now, 0
        self.ledger.ended += 1
        self.router.costs.learn(event.facts)
        group = self.table.groups[attempt.group]
        member.phase, member.facts, member.oldest, member.resume = Phase.DONE, event.facts, event.facts.oldest, None
        group.done.append(member.index)
        if len(group.done) == self.policy.siblings:
            self._complete(group, now)
        self._refuse_if_stale(group)

    def _complete(self, group: Group, now: float) -> None:
        for attempt in list(self.table.current(group)):
            self._cancel(attempt, "spare")
        for member in group.members:
            if member.phase is not Phase.DONE:
                member.phase = Phase.SPARED
        group.ready = now
        self.ledger.completed += 1
        self.bank.add(group.id, now)

    def _failed(self, event: news.AttemptFailed, now: float) -> None:
        member = self._current(event.attempt)
        if member is None:
            return
        self._release(event.attempt)
        self.broken += 1
        self.last_fault = f"{event.attempt}: {event.detail}"
        group = self.table.groups[event.attempt.group]
        if event.blame is Blame.TASK:
            self.quarantine.add(group.task)
            self._drop(group, "task")
            return
        member.failures += 1
        self._try_again(group, member, event.attempt if event.resumable else None)

    def _try_again(self, group: Group, member: Member, resume: AttemptId | None) -> None:
        """Back to waiting under a new try, or lost; a group that can no longer be whole is dropped."""
        if member.failures > self.policy.retries:
            member.phase = Phase.LOST
            hopeful = sum(m.phase is not Phase.LOST for m in group.members)
            if hopeful < self.policy.siblings:
                self._drop(group, "failed")
            return
        self.ledger.retried += 1
        self.ledger.restarted += resume is None
        member.resume = resume
        self.table.wait_again(group, member)

    def _drop(self, group: Group, reason: str) -> None:
        for attempt in list(self.table.current(group)):
            self._cancel(attempt, reason)
        self.bank.discard(group.id)
        del self.table.groups[group.id]
        self.ledger.dropped[reason] += 1
        self._out.append(order.DropGroup(group=group.id, reason=reason, attempts=group.attempts()))

    def _refuse_if_stale(self, group: Group) -> None:
        oldest = group.oldest
        if oldest is not None and freshness.is_stale(self.version, oldest, self.policy.bound):
            self._drop(group, "stale")

    def _trainer_ready(self, event: news.TrainerReady) -> None:
        if event.version < self.version:
            return  # late: it has made a newer version since
        if self.trainer == "stepping":
            self.ready_ahead = event.version > self.version  # its StepFinished is still on the way
            return
        self.trainer = "ready"
        if self.training is not None:  # the step it was given before it (or we) went away
            self.trainer = "stepping"
            self._out.append(self.training)

    def _stepped(self, event: news.StepFinished, now: float) -> None:
        if self.training is None or event.batch != self.training.batch:
            self.ledger.late += 1
            return
        self.moved_at = now
        self.held.append((event.version, len(self.training.proofs)))
        self.ledger.trained += len(self.training.proofs)
        self.training, self.version, self.steps = None, event.version, self.steps + 1
        self.trainer = "ready" if self.ready_ahead else "absent"  # until it asks for more
        self.ready_ahead = False
        for group in list(self.table.groups.values()):
            self._refuse_if_stale(group)

    def _engine_changed(self, event: news.EngineUp | news.EngineDown, now: float) -> None:
        known = self.router.engines.get(event.engine)
        if known is not None and event.epoch < known.epoch:
            return
        if isinstance(event, news.EngineDown):
            if known is not None:
                self._lose(known)
            return
        if known is not None and event.epoch == known.epoch:
            return
        if known is not None:
            self._lose(known)
        ranks = [Rank(Place(event.engine, i), event.slots, event.kv_tokens) for i in range(event.ranks)]
        self.router.engines[event.engine] = Engine(
            event.engine, event.epoch, event.version, ranks, admitted=event.version == self.version
        )
        self.moved_at = now

    def _lose(self, engine: Engine) -> None:
        """Its conversations move to the next best place, histories prefilled there; where there is none they wait."""
        orphans = [attempt for rank in engine.ranks for attempt in rank.attempts]
        engine.admitted = False
        for attempt in orphans:
            self.router.places.pop(attempt, None)
        del self.router.engines[engine.name]
        for attempt in orphans:
            place = self.router.place(attempt, history=self.router.costs.tokens)
            member = self.table.running[attempt]
            if place is None:
                self._interrupt(attempt, "no engine serves")
            else:
                member.place = place
                self.router.add(attempt, place)
                self._out.append(order.MoveAttempt(attempt=attempt, place=place))

    def _interrupt(self, attempt: AttemptId, reason: str) -> None:
        """Stop a try through no fault of its own and carry its durable turns over to the next."""
        member = self.table.running[attempt]
        self._cancel(attempt, reason, keep=True)
        member.resume = attempt
        self.table.wait_again(self.table.groups[attempt.group], member)

    def _engine_said(
        self, event: news.EngineLoads | news.EngineStaged | news.EngineLoaded | news.EngineLoadFailed, now: float
    ) -> None:
        engine = self.router.engines.get(event.engine)
        if engine is None or engine.epoch != event.epoch:
            return
        match event:
            case news.EngineLoads():
                for load in event.loads:
                    if 0 <= load.rank < len(engine.ranks):
                        engine.ranks[load.rank].load = load
                self._rebalance(engine)
            case news.EngineStaged():
                engine.staged, engine.staging = max(event.version, engine.staged or event.version), None
            case news.EngineLoaded():
                engine.swapping, engine.failures = None, 0
                engine.version = max(engine.version, event.version)
                engine.admitted |= engine.version >= publication.live_version(self._engines(), self.version)
                self._free_places()
                self.moved_at = now
            case news.EngineLoadFailed():
                engine.staging = engine.staged = engine.swapping = None
                engine.failures += 1
                if engine.failures > self.policy.load_retries:
                    self._out.append(order.RestartEngine(engine=engine.name, epoch=engine.epoch, reason=event.detail))
                    self._lose(engine)

    def _rebalance(self, engine: Engine) -> None:
        """At most one conversation a report moves, so that its effect is seen before the next."""
        better = self.router.better(engine, self.policy.move_margin) if engine.admitted else None
        if better is not None:
            attempt, place = better
            self.router.move(attempt, place)
            self.table.running[attempt].place = place
            self._out.append(order.MoveAttempt(attempt=attempt, place=place))

    def _host_down(self, event: news.SandboxHostDown) -> None:
        if self.hosts.pop(event.host, None) is not None:
            for attempt in [a for a, m in self.table.running.items() if m.host == event.host]:
                self._interrupt(attempt, f"sandbox host {event.host}: {event.reason}")

    def _resumed(self, event: news.Resumed, now: float) -> None:
        """Nothing runs any more. Counters, bank, ledger and the batch in training are as they were."""
        for attempt in list(self.table.running):
            self._interrupt(attempt, "resumed")
        self._out.clear()  # there is nobody left to cancel
        self.finished = None
        self.router.engines.clear()
        self.hosts.clear()
        self.offered.clear()
        self.asked = 0
        self.trainer, self.ready_ahead, self.draining, self.paused = "absent", False, False, False
        self.target, self.moved_at, self.broken = event.steps, now, 0

    def _drain(self) -> None:
        self.draining = True
        for attempt in list(self.table.running):
            self._interrupt(attempt, "drain")

    # --- rules ----------------------------------------------------------------------------------------------------

    def _engines(self) -> list[Engine]:
        return list(self.router.engines.values())

    def _expire(self, now: float) -> None:
        for attempt in self.table.overdue(now):
            member = self.table.running.get(attempt)
            if member is None:
                continue  # its group was dropped for a sibling's sake just now
            self._cancel(attempt, f"no end after {self.policy.attempt_timeout_s:g} s")
            self.last_fault = f"{attempt}: on {member.place} and {member.host} past its deadline"
            self.broken += 1
            member.failures += 1
            self._try_again(self.table.groups[attempt.group], member, None)

    def _fill(self) -> None:
        """Cut a batch: the first complete groups, in completion order, all fresh by the sweep at the last step."""
        ready = self.trainer == "ready" and not (self.paused or self.draining)
        if not ready or self.steps >= self.target or len(self.bank) < self.policy.groups:
            return
        groups = [self.table.groups.pop(group) for group in self.bank.take(self.policy.groups)]
        self.training = order.TrainOn(
            batch=self.batches,
            version=self.version,
            bound=self.policy.bound,
            proofs=tuple(_proof(group) for group in groups),
            attempts=tuple(facts.attempt for group in groups for facts in group.counted()),
        )
        self.batches += 1
        self.trainer = "stepping"
        self._out.append(self.training)

    def _publish(self) -> None:
        engines = self._engines()
        for engine in publication.to_stage(engines, self.version):
            engine.staging = self.version
            self._out.append(order.StageWeights(engine=engine.name, epoch=engine.epoch, version=self.version))
        for engine in publication.to_swap(
            engines, self.version, order=self.policy.order, max_unavailable=self.policy.max_unavailable
        ):
            engine.swapping = self.version
            self._out.append(order.SwapWeights(engine=engine.name, epoch=engine.epoch, version=self.version))
        self._free_places()

    def _free_places(self) -> None:
        live = publication.live_version(self._engines(), Version(-1))
        while self.held and self.held[0][0] <= live:
            self.held.popleft()

    @property
    def places_used(self) -> int:
        """Of the window: open groups, those in training, and trained ones whose weights are not live everywhere."""
        training = len(self.training.proofs) if self.training is not None else 0
        return len(self.table.groups) + training + sum(count for _, count in self.held)

    def _may_admit(self) -> bool:
        return self.places_used < self.policy.window_groups and freshness.admits(
            open_groups=len(self.table.groups),
            batch_groups=self.policy.groups,
            stepping=self.training is not None,
            trainer=self.version,
            live=publication.live_version(self._engines(), self.version),
            bound=self.policy.bound,
        )

    def _start(self, now: float) -> None:
        """Finish open groups before opening new ones; a place is asked for only when the attempt can start at once."""
        if self.paused or self.draining or self.steps >= self.target:
            return
        while len(self.table.running) < self.policy.window_attempts:
            host = self._host()
            if host is None or not any(engine.admitted for engine in self._engines()):
                return
            waiting = self.table.next_waiting()
            if waiting is None:
                if not self._may_admit() or not self._admit(now):
                    return
                continue
            self._start_attempt(*waiting, host, now)

    def _start_attempt(self, group: Group, member: Member, host: str, now: float) -> None:
        attempt = AttemptId(group.id, member.index, member.tries)
        place = self.router.place(attempt)
        assert place is not None, "an engine is admitted"
        deadline = now + self.policy.attempt_timeout_s
        self.table.start(group, member, place, host, now, deadline)
        self.router.add(attempt, place)
        self.host_load[host] += 1
        self.ledger.started += 1
        self._out.append(
            order.StartAttempt(
                attempt=attempt, task=group.task, place=place, host=host, deadline_s=deadline, resume=member.resume
            )
        )

    def _host(self) -> str | None:
        """The emptiest sandbox host with room, by share; ties end in the name."""
        room = [(self.host_load[h] / c, h) for h, c in self.hosts.items() if self.host_load[h] < c]
        return min(room)[1] if room else None

    def _admit(self, now: float) -> bool:
        while self.offered:
            task = self.offered.popleft()
            if task not in self.quarantine:
                self.table.admit(task, self.policy.siblings + self.policy.spare, now)
                self.ledger.admitted += 1
                return True
        if not self.asked:
            self.asked = self.policy.groups
            self._out.append(order.PullTasks(count=self.asked))
        return False

    # --- the end --------------------------------------------------------------------------------------------------

    def _finish(self, now: float) -> None:
        published = publication.is_published(self._engines(), self.version)
        settled = self.training is None and published
        if self.steps >= self.target and settled and self.router.engines:
            for group in list(self.table.groups.values()):
                self._drop(group, "end")
            self._end("done")
        elif self.draining and (settled or (published and self.trainer == "absent")):
            self._end("drained")
        elif self.broken > 3 * max(self.policy.window_attempts, self.policy.siblings):
            self._end("failed", f"{self.broken} attempts failed in a row, the last one {self.last_fault}")
        elif not self.paused and now >= self.moved_at + self.policy.stall_s:
            self._end("no-progress", self.blockers(now))

    def _end(self, outcome: str, detail: str = "") -> None:
        for attempt in list(self.table.running):
            self._interrupt(attempt, outcome)
        self.finished = order.Finish(outcome=outcome, detail=detail)
        self._out.append(self.finished)

    def blockers(self, now: float) -> str:
        """Who keeps the next batch from the trainer, by name."""
        if self.training is not None:
            return f"the trainer has batch {self.training.batch} and does not answer"
        if not any(engine.admitted for engine in self._engines()):
            return "no engine serves"
        if not self.hosts:
            return "no sandbox host is up"
        if len(self.bank) >= self.policy.groups:
            return "a batch is ready and no trainer asks for it"
        slowest = sorted((m.started, a) for a, m in self.table.running.items())[:3]
        if slowest:
            return "waiting for " + ", ".join(
                f"{a} (on {self.table.running[a].place} and {self.table.running[a].host} for {now - t:.0f} s)"
                for t, a in slowest
            )
        return "no task is offered" if self.asked else "the window admits nothing"


def _proof(group: Group) -> GroupProof:
    facts = group.counted()
    return GroupProof(group=group.id, oldest=min(f.oldest for f in facts), newest=max(f.versions[-1][0] for f in facts))
