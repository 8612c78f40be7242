"""The scheduler: one method in, a list of orders out.

    handle(event, now) -> commands     absorb the fact (what it makes stale is refused at once), then apply the rules in
                                       one fixed order: expire -> fill the batch -> publish -> admit and start -> finish
    next_deadline()                    the earliest moment at which handle(Tick(), now) would matter

What a fact changes is in attempts (the life of a group and its attempts) and fleet (engines, hosts, weights); the rules
those apply are in bank, freshness, publication, routing. `laws.py` states what holds after every event.
"""

from __future__ import annotations

from agentrl.records import AttemptId
from agentrl.scheduler import admission, attempts, cut, fleet, publication
from agentrl.scheduler import commands as order
from agentrl.scheduler import events as news
from agentrl.scheduler.groups import Group, Member
from agentrl.scheduler.state import State


class Core(State):
    """Single-threaded, deterministic: the same (event, now) sequence gives the same commands."""

    # --- the shell ------------------------------------------------------------------------------------------------

    def handle(self, event: news.Event, now: float) -> list[order.Command]:
        if self.finished is not None and not isinstance(event, news.Resumed):
            return []
        self.out = []
        self.window.elapsed(now, self.places_held, len(self.bank), len(self.table.running))
        self._absorb(event, now)
        attempts.expire(self, now)
        self._fill(now)
        fleet.publish(self, now)
        cut.begin_round(self)
        self._start(now)
        self._finish(now)
        return self.out

    def next_deadline(self) -> float | None:
        if self.finished is not None:
            return None
        stall = None if self.paused else self.moved_at + self.policy.stall_s
        drains = (engine.draining for engine in self.engines if engine.swapping is None)
        return min((t for t in (self.table.next_deadline(), stall, *drains) if t is not None), default=None)

    # --- facts ----------------------------------------------------------------------------------------------------

    def _absorb(self, event: news.Event, now: float) -> None:
        match event:
            case news.AttemptEnded():
                attempts.ended(self, event, now)
            case news.AttemptFailed():
                attempts.failed(self, event, now)
            case news.AttemptBegan():
                attempts.began(self, event, now)
            case news.Progressed():
                self.moved_at = now
            case news.TaskOffered():
                self.asked = max(0, self.asked - 1)
                self.offered.append(event.task)
            case news.TrainerReady():
                self._trainer_ready(event, now)
            case news.TrainerDown():
                self.trainer, self.ready_ahead = "absent", False
            case news.StepFinished():
                self._stepped(event, now)
            case news.WeightsOffered():
                self._offered_weights(event, now)
            case news.EngineUp() | news.EngineDown():
                fleet.engine_changed(self, event, now)
            case news.EngineLoads() | news.EngineStaged() | news.EngineLoaded() | news.EngineLoadFailed():
                fleet.engine_said(self, event, now)
            case news.SandboxHostUp():
                self.hosts[event.host] = event.capacity
                self.moved_at = now
            case news.SandboxHostDown():
                fleet.host_down(self, event)
            case news.Resumed():
                self._resumed(event, now)
            case news.PauseAsked():
                self.paused = event.on
                self.moved_at = now
            case news.DrainAsked():
                self._drain()
            case news.SandboxHostLoads() | news.Tick():
                pass

    def _trainer_ready(self, event: news.TrainerReady, now: float) -> None:
        if event.version < self.version:
            return  # late: it has made a newer version since
        if self.trainer == "stepping":
            self.ready_ahead = event.version > self.version  # its StepFinished is still on the way
            return
        self.trainer = "ready"
        self.window.trainer_ready(now)
        if self.training is not None:  # the step it was given before it (or we) went away
            self.trainer = "stepping"
            self.out.append(self.training)

    def _stepped(self, event: news.StepFinished, now: float) -> None:
        if self.training is None or event.batch != self.training.batch:
            self.ledger.late += 1
            return
        self.moved_at = now
        self.held.append((event.version, len(self.training.proofs)))
        self.ledger.trained += len(self.training.proofs)
        groups = len(self.training.proofs)
        self.training, self.version, self.steps = None, event.version, self.steps + 1
        cut.end_of_step(self, groups)
        self.trainer = "ready" if self.ready_ahead else "absent"  # until it asks for more
        if self.ready_ahead:
            self.window.trainer_ready(now)
        self.ready_ahead = False
        self._refuse_stale()

    def _offered_weights(self, event: news.WeightsOffered, now: float) -> None:
        """Not while a step runs: its result would not be of the version that it was meant to follow."""
        if self.training is None and event.version > self.version:
            self.version = self.round_version = event.version
            self.trainer, self.moved_at = "absent", now
            self._refuse_stale()

    def _refuse_stale(self) -> None:
        for group in list(self.table.groups.values()):
            attempts.refuse_if_stale(self, group)

    def _resumed(self, event: news.Resumed, now: float) -> None:
        """Nothing runs any more. Counters, bank, ledger and the batch in training are as they were."""
        for attempt in list(self.table.running):
            attempts.interrupt(self, attempt, "resumed")
        self.out.clear()  # there is nobody left to cancel
        self.finished = None
        self.buried.update({engine.name: engine.epoch for engine in self.engines})
        self.router.engines.clear()
        self.hosts.clear()
        self.offered.clear()
        self.asked = 0
        self.trainer, self.ready_ahead, self.draining, self.paused = "absent", False, False, False
        self.target, self.moved_at, self.broken = event.steps, now, 0

    def _drain(self) -> None:
        self.draining = True
        for attempt in list(self.table.running):
            attempts.interrupt(self, attempt, "drain")

    # --- rules ----------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> None:
        if self.trainer != "ready" or self.paused or self.draining or self.steps >= self.target:
            return
        chosen = cut.next_groups(self)
        if chosen:
            self.window.cut(now, self.room)
            self.training = cut.make(self, chosen)
            self.batches += 1
            self.trainer = "stepping"
            self.out.append(self.training)

    def _start(self, now: float) -> None:
        """Finish open groups before opening new ones; a place is asked for only when the attempt can start at once."""
        if self.paused or self.draining or self.steps >= self.target:
            return
        key = admission.key_of(self, now)
        while len(self.table.running) < self.window.attempts:
            host = self._host()
            if host is None or not any(engine.takes_work for engine in self.engines):
                return
            waiting = self.table.next_waiting(key)
            if waiting is None:
                if not self.may_admit() or not self._admit(now):
                    return
                continue
            self._start_attempt(*waiting, host, now)

    def may_admit(self) -> bool:
        """Whether another group may open: the window's depth and fence 1."""
        return cut.may_admit(self)

    def _start_attempt(self, group: Group, member: Member, host: str, now: float) -> None:
        attempt = AttemptId(group.id, member.index, member.tries)
        place = attempts.place(self, attempt, member)
        assert place is not None, "an engine takes work"
        deadline = now + self.policy.attempt_timeout_s
        self.table.start(group, member, place, host, now, deadline)
        version = self.router.engines[place.engine].version
        member.floor = version if member.floor is None else min(member.floor, version)
        self.router.add(attempt, place)
        self.host_load[host] += 1
        self.ledger.started += 1
        self.out.append(
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
                self.table.admit(task, self.policy.siblings + self.policy.spare, now, self.window.groups)
                self.ledger.admitted += 1
                self.round_admitted += 1
                return True
        if not self.asked:
            self.asked = self.policy.groups
            self.out.append(order.PullTasks(count=self.asked))
        return False

    # --- the end --------------------------------------------------------------------------------------------------

    def _finish(self, now: float) -> None:
        published = publication.is_published(self.engines, self.serving)
        settled = self.training is None and published
        if self.steps >= self.target and settled and self.router.engines:
            for group in list(self.table.groups.values()):
                attempts.drop(self, group, "end")
            self._end("done")
        elif self.draining and (settled or (published and self.trainer == "absent")):
            self._end("drained")
        elif self.broken > 3 * max(self.policy.window_attempts, self.policy.siblings):
            self._end("failed", f"{self.broken} attempts failed in a row, the last one {self.last_fault}")
        elif not self.paused and now >= self.moved_at + self.policy.stall_s:
            self._end("no-progress", self.blockers(now))

    def _end(self, outcome: str, detail: str = "") -> None:
        for attempt in list(self.table.running):
            attempts.interrupt(self, attempt, outcome)
        self.finished = order.Finish(outcome=outcome, detail=detail)
        self.out.append(self.finished)

    def blockers(self, now: float) -> str:
        """Who keeps the next batch from the trainer, by name."""
        if self.training is not None:
            return f"the trainer has batch {self.training.batch} and does not answer"
        if not any(engine.admitted for engine in self.engines):
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
