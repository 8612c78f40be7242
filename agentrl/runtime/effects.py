"""Orders become port calls, port calls become events. Every task has the run's one TaskGroup as its parent.

A boundary raises a typed error, `errors.classify` says whose fault it is, and the core alone decides what follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from agentrl import ports
from agentrl.errors import AgentRLError, EngineTorn, SandboxLost, UnavailableError, classify
from agentrl.records import AttemptId, Batch, Blame, LoadReport, StepReport, Task, TaskId, Trajectory, Turn, Version
from agentrl.runtime.agreement import Checksums
from agentrl.runtime.lag import LoopLag
from agentrl.runtime.masking import masked
from agentrl.runtime.placement import Cell
from agentrl.runtime.player import Heard, Player
from agentrl.runtime.supervisor import EngineKeeper, HostKeeper
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news

log = logging.getLogger("agentrl.effects")

Post = Callable[[news.Event], None]


class Observer:
    """What telemetry hears, beside the events and orders themselves. The base class ignores all of it."""

    def turn(self, attempt: AttemptId, turn: Turn) -> None: ...

    def ended(self, trajectory: Trajectory) -> None: ...

    def stepped(self, batch: Batch, report: StepReport) -> None: ...

    def staged(self, engine: str, version: Version, seconds: float) -> None: ...

    def swapped(self, engine: str, report: LoadReport, began: float, others_tokens: int) -> None:
        """others_tokens: what the other engines sampled from the beginning of this swap to its end."""


@dataclass(kw_only=True)
class World:
    """The concrete parts of one run, live or simulated. Registries are filled by supervisors as things come up.

    admin_s: deadline of one weight call. regenerate, grace_s: how engines swap (ports.Engine.swap). checksums: theirs
    after a swap are compared; None: they are not alike.
    """

    engines: dict[str, ports.Engine] = field(default_factory=dict)
    keepers: dict[str, EngineKeeper] = field(default_factory=dict)
    host_keepers: dict[str, HostKeeper] = field(default_factory=dict)
    player: Player
    tasks: ports.TaskSource
    journal: ports.Journal
    weights: ports.WeightStore
    trainer: ports.Trainer
    clock: Callable[[], float]
    keep_versions: int
    admin_s: float
    regenerate: bool = False
    grace_s: float = 0.0
    checksums: Checksums | None = None
    lag: LoopLag = field(default_factory=LoopLag)


@dataclass
class Effects:
    """Obeys orders. `group` owns every task started here."""

    group: asyncio.TaskGroup
    world: World
    post: Post
    observer: Observer
    progressed: Callable[[], None]
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _after: set[asyncio.Task[None]] = field(default_factory=set)  # of those: what finished attempts left to do
    _attempts: dict[AttemptId, asyncio.Task[None]] = field(default_factory=dict)
    _cells: dict[AttemptId, Cell] = field(default_factory=dict)
    _tasks: dict[TaskId, Task] = field(default_factory=dict)

    def remember(self, task: Task) -> None:
        """A task that a resumed run needs again."""
        self._tasks[task.id] = task

    def obey(self, order: orders.Command) -> None:
        match order:
            case orders.PullTasks():
                self._spawn(self._pull(order.count), "tasks")
            case orders.StartAttempt():
                self._start(order)
            case orders.CancelAttempt():
                self._cancel(order)
            case orders.MoveAttempt():
                if order.attempt in self._cells:
                    self._cells[order.attempt].move(order.place)
            case orders.TrainOn():
                self._spawn(self._train(order), f"step {order.batch}")
            case orders.StageWeights():
                self._spawn(self._stage(order), f"stage {order.engine} v{order.version}")
            case orders.SwapWeights():
                self._spawn(self._swap(order), f"swap {order.engine} v{order.version}")
            case orders.RestartEngine():
                self.world.keepers[order.engine].restart(order.reason)
            case orders.DropGroup():
                self.world.journal.discard(order.attempts)
            case orders.Finish():
                pass

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self.group.create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(self._after.discard)
        return task

    async def stop(self, *, within_s: float) -> None:
        """Cancel what still runs and wait for its end: sandboxes are given back, which needs their hosts."""
        running = set(self._running)
        for task in running - self._after:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=within_s)

    async def _pull(self, count: int) -> None:
        for task in await asyncio.to_thread(self.world.tasks.next_tasks, count):
            self._tasks[task.id] = task
            self.post(news.TaskOffered(task=task.id, kind=task.kind))

    # --- attempts ---------------------------------------------------------------------------------------------------

    def _start(self, order: orders.StartAttempt) -> None:
        attempt = order.attempt
        cell = self._cells[attempt] = Cell(order.place, self._alive)
        task = self._spawn(self._play(order, cell), str(attempt))
        self._attempts[attempt] = task
        task.add_done_callback(lambda _: (self._attempts.pop(attempt, None), self._cells.pop(attempt, None)))

    async def _alive(self, engine: str) -> bool:
        keeper = self.world.keepers.get(engine)
        return keeper is not None and await keeper.alive()

    async def _host_alive(self, host: str) -> bool:
        keeper = self.world.host_keepers.get(host)
        return keeper is not None and await keeper.alive()

    async def _play(self, order: orders.StartAttempt, cell: Cell) -> None:
        attempt = order.attempt
        heard = Heard(
            began=lambda version: self.post(news.AttemptBegan(attempt=attempt, oldest=version)),
            turn=lambda turn: self._turn_done(attempt, turn),
            ended=self.observer.ended,
            later=lambda left: self._after.add(self._spawn(self._finish(attempt, left), f"after {attempt}")),
        )
        try:
            facts = await self.world.player.play(order, self._tasks[order.task], cell, heard)
        except Exception as exc:
            if isinstance(exc, SandboxLost | UnavailableError) and not await self._host_alive(order.host):
                return  # the whole host is down: that news takes this attempt along, and it is not the attempt's fault
            self._failed(attempt, exc)
            return
        self.post(news.AttemptEnded(facts=facts))

    async def _finish(self, attempt: AttemptId, left: Coroutine[None, None, None]) -> None:
        """The attempt is over and cannot fail any more, whatever becomes of what it left."""
        try:
            await left
        except Exception as exc:
            log.warning("%s: its sandbox was not given back: %s", attempt, exc)

    def _turn_done(self, attempt: AttemptId, turn: Turn) -> None:
        self.observer.turn(attempt, turn)
        self.progressed()

    def _failed(self, attempt: AttemptId, exc: Exception) -> None:
        blame = classify(exc)
        if blame is Blame.BUG:
            log.error("%s: a bug of ours", attempt, exc_info=exc)
        else:
            log.warning("%s: %s (%s)", attempt, exc, blame)
        resumable = blame is Blame.INFRA and getattr(exc, "resumable", True)
        if not resumable:
            self.world.journal.forget(attempt)
        detail = f"{type(exc).__name__}: {exc}"
        self.post(news.AttemptFailed(attempt=attempt, blame=blame, detail=detail, resumable=resumable))

    def _cancel(self, order: orders.CancelAttempt) -> None:
        task = self._attempts.get(order.attempt)
        if task is not None:
            task.cancel(order.reason)
        if not order.keep:
            self.world.journal.forget(order.attempt)

    # --- steps and weights ------------------------------------------------------------------------------------------

    async def _train(self, order: orders.TrainOn) -> None:
        """The order is on disk before the trainer sees the batch: a resumed run gives the same one again."""
        world = self.world
        await world.journal.flush()
        trajectories = await world.journal.load(order.attempts)
        if order.mask:
            floor = Version(order.version - order.bound)
            trajectories = [masked(trajectory, floor) for trajectory in trajectories]
        batch = Batch(
            id=order.batch,
            version=order.version,
            bound=order.bound,
            proofs=order.proofs,
            trajectories=tuple(trajectories),
        )
        report = await world.trainer.step(batch)
        self.observer.stepped(batch, report)
        self.post(news.StepFinished(batch=batch.id, version=report.version, seconds=report.seconds))

    async def _stage(self, order: orders.StageWeights) -> None:
        engine = self.world.engines.get(order.engine)
        if engine is None:
            return  # its EngineDown is on the way
        try:
            path = await asyncio.to_thread(self.world.weights.path, order.version)
            seconds = await engine.stage(path, order.version, deadline_s=self.world.admin_s)
        except AgentRLError as exc:
            self._load_failed(order.engine, order.epoch, order.version, exc)
            return
        self.observer.staged(order.engine, order.version, seconds)
        self.post(news.EngineStaged(engine=order.engine, epoch=order.epoch, version=order.version))

    async def _swap(self, order: orders.SwapWeights) -> None:
        world = self.world
        engine = world.engines.get(order.engine)
        if engine is None:
            return
        others = [e for name, e in world.engines.items() if name != order.engine]
        try:
            before, began = await _sampled(others), world.clock()
            report = await engine.swap(
                world.weights.path(order.version),
                order.version,
                deadline_s=world.admin_s + world.grace_s,
                regenerate=world.regenerate,
                grace_s=world.grace_s,
            )
            after = await _sampled(others)
        except AgentRLError as exc:
            self._load_failed(order.engine, order.epoch, order.version, exc)
            if isinstance(exc, EngineTorn) and world.engines.get(order.engine) is engine:
                world.keepers[order.engine].restart(str(exc))
            return
        if world.checksums is not None and (why := world.checksums.differs(order.engine, report)):
            self._load_failed(order.engine, order.epoch, order.version, EngineTorn(why))
            world.keepers[order.engine].restart(why)
            return
        self.observer.swapped(order.engine, report, began, after - before)
        self.post(news.EngineLoaded(engine=order.engine, epoch=order.epoch, version=report.version))
        await asyncio.to_thread(world.weights.prune, world.keep_versions)

    def _load_failed(self, engine: str, epoch: int, version: Version, exc: AgentRLError) -> None:
        log.warning("engine %s did not take version %d: %s", engine, version, exc)
        self.post(news.EngineLoadFailed(engine=engine, epoch=epoch, version=version, detail=str(exc)))


async def _sampled(engines: list[ports.Engine]) -> int:
    """Tokens sampled so far by those that answer."""
    counts = await asyncio.gather(*(e.generated_tokens(deadline_s=5.0) for e in engines), return_exceptions=True)
    return sum(count for count in counts if isinstance(count, int))
