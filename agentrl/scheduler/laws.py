"""What always holds, numbered as in docs/laws.md. Checked after every event in tests, when idle in production.

`Laws` remembers what no single state shows: which ids were ever used, which groups ever ended.
"""

from __future__ import annotations

from agentrl.records import AttemptId, GroupId, Version
from agentrl.scheduler import commands as order
from agentrl.scheduler import freshness
from agentrl.scheduler.core import Core
from agentrl.scheduler.groups import Phase


class LawBroken(AssertionError):
    def __init__(self, law: int, what: str) -> None:
        super().__init__(f"law {law}: {what}")
        self.law = law


class Laws:
    """One checker for one core, from its first event on. `note` hears every order; `audit` looks at the whole state."""

    def __init__(self) -> None:
        self._started: set[AttemptId] = set()
        self._ended: dict[GroupId, str] = {}
        self._versions: dict[tuple[str, int], Version] = {}
        self._trainer = Version(0)
        self._steps = 0
        self._batches: dict[int, order.TrainOn] = {}
        self._running = self._places = 0

    def check(self, core: Core, commands: list[order.Command]) -> None:
        self.note(core, commands)
        self.audit(core)

    def note(self, core: Core, commands: list[order.Command]) -> None:
        stepped = core.steps - self._steps
        if core.version < self._trainer or (stepped and core.version > self._trainer + stepped):
            raise LawBroken(8, f"the trainer went from version {self._trainer} to {core.version} in {stepped} steps")
        self._trainer, self._steps = core.version, core.steps
        self._window(core)
        for command in commands:
            match command:
                case order.StartAttempt():
                    self._start(core, command)
                case order.TrainOn():
                    self._train(core, command)
                case order.DropGroup():
                    self._end(command.group, command.reason)
                case _:
                    pass

    def audit(self, core: Core) -> None:
        self._ledger(core)
        self._progress(core)
        self._slots(core)
        self._placements(core)
        self._publication(core)
        self._bank(core)
        self._one_version(core)
        if core.policy.when_stale == "wait" and core.ledger.dropped["stale"]:
            raise LawBroken(14, f"{core.ledger.dropped['stale']} groups expired although the cut waits for them")

    def _end(self, group: GroupId, how: str) -> None:
        if group in self._ended:
            raise LawBroken(1, f"group {group} ended twice: {self._ended[group]}, then {how}")
        self._ended[group] = how

    def _ledger(self, core: Core) -> None:
        book = core.ledger
        training = len(core.training.proofs) if core.training is not None else 0
        known = book.trained + sum(book.dropped.values()) + len(core.table.groups) + training
        if book.admitted != known:
            raise LawBroken(1, f"{book.admitted} groups admitted, {known} accounted for")
        if len(self._ended) != book.admitted - len(core.table.groups):
            raise LawBroken(1, f"{len(self._ended)} groups were seen to end, the ledger says otherwise")

    def _train(self, core: Core, batch: order.TrainOn) -> None:
        if batch.batch in self._batches:
            if self._batches[batch.batch] != batch:
                raise LawBroken(8, f"batch {batch.batch} was given twice with different contents")
            return
        self._batches[batch.batch] = batch
        for proof in batch.proofs:
            if any(freshness.is_stale(batch.version, v, core.policy.bound) for v in (proof.oldest, proof.tokens[0][0])):
                raise LawBroken(2, f"batch {batch.batch} at version {batch.version} holds {proof}")
            self._end(proof.group, "trained")
        wanted = core.policy.groups * core.policy.siblings
        per_group = {p.group: 0 for p in batch.proofs}
        for attempt in batch.attempts:
            if attempt.group not in per_group:
                raise LawBroken(7, f"batch {batch.batch} holds {attempt} of a group without proof")
            per_group[attempt.group] += 1
        whole = all(count == core.policy.siblings for count in per_group.values())
        if len(set(batch.attempts)) != wanted or len(per_group) != core.policy.groups or not whole:
            raise LawBroken(7, f"batch {batch.batch} is not {core.policy.groups} whole groups: {per_group}")
        if batch.version != core.version:
            raise LawBroken(8, f"batch {batch.batch} is for version {batch.version}, the trainer holds {core.version}")

    def _progress(self, core: Core) -> None:
        if core.finished is None and not core.paused and core.next_deadline() is None:
            raise LawBroken(3, "waiting without a deadline")

    def _start(self, core: Core, start: order.StartAttempt) -> None:
        if start.attempt in self._started:
            raise LawBroken(5, f"{start.attempt} was started twice")
        self._started.add(start.attempt)
        engine = core.router.engines.get(start.place.engine)
        if engine is None or not engine.admitted or start.host not in core.hosts:
            raise LawBroken(6, f"{start.attempt} was placed on {start.place} and {start.host}, which do not serve")

    def _slots(self, core: Core) -> None:
        running = sum(m.phase is Phase.RUNNING for g in core.table.groups.values() for m in g.members)
        if running != len(core.table.running):
            raise LawBroken(4, f"{running} members run, {len(core.table.running)} attempts are known")
        for attempt in core.table.running:
            group = core.table.groups.get(attempt.group)
            if group is None or group.members[attempt.member].tries - 1 != attempt.attempt:
                raise LawBroken(5, f"{attempt} runs and is not its member's newest try")

    def _placements(self, core: Core) -> None:
        ranks = {a: r.place for e in core.router.engines.values() for r in e.ranks for a in r.attempts}
        if ranks != core.router.places or set(ranks) != set(core.table.running):
            raise LawBroken(6, "placements, ranks and running attempts disagree")
        if any(m.place != ranks[a] for a, m in core.table.running.items()):
            raise LawBroken(6, "a member's place is not where it is counted")
        hosts = sum(core.host_load.values())
        if hosts != len(core.table.running) or min(core.host_load.values(), default=0) < 0:
            raise LawBroken(6, f"{hosts} sandboxes counted, {len(core.table.running)} attempts run")

    def _window(self, core: Core) -> None:
        """Nothing is begun beyond W and C; where they were just made smaller, what had begun goes on."""
        places, running = core.places_used, len(core.table.running)
        if places > max(core.window.groups, self._places):
            raise LawBroken(9, f"{places} places used of {core.window.groups}")
        if running > max(core.window.attempts, self._running):
            raise LawBroken(4, f"{running} attempts run, the window allows {core.window.attempts}")
        self._places, self._running = places, running

    def _publication(self, core: Core) -> None:
        swapping = 0
        for engine in core.router.engines.values():
            key = (engine.name, engine.epoch)
            if engine.version < self._versions.get(key, engine.version) or engine.version > core.version:
                raise LawBroken(10, f"{engine.name} went from version {self._versions.get(key)} to {engine.version}")
            self._versions[key] = engine.version
            swapping += engine.admitted and engine.swapping is not None
        if core.policy.order == "rolling" and swapping > core.policy.max_unavailable:
            raise LawBroken(10, f"{swapping} serving engines swap at once")

    def _bank(self, core: Core) -> None:
        ready = [g for g in core.table.groups.values() if g.ready is not None]
        if {g.id for g in ready} != {g for g, _ in core.bank.items()}:
            raise LawBroken(11, "the bank is not the set of ready groups")
        for group in core.table.groups.values():
            done = sum(m.phase is Phase.DONE for m in group.members)
            if (group.ready is not None) != (done >= core.policy.siblings):
                raise LawBroken(11, f"group {group.id} has {done} members done, ready at {group.ready}")
            oldest = group.oldest
            kept = core.policy.when_stale != "mask"
            if kept and oldest is not None and freshness.is_stale(core.version, oldest, core.policy.bound):
                raise LawBroken(2, f"group {group.id} with a token of version {oldest} is kept at {core.version}")

    def _one_version(self, core: Core) -> None:
        book = core.ledger
        if book.unsaid:
            raise LawBroken(
                13, f"{book.unsaid} of {book.mixed} trajectories of several versions are no stated fallback"
            )
