"""The driver: one inbox, one TaskGroup, one core. Live and simulated runs use this same loop.

await one event, or the core's next deadline  ->  handle  ->  journal it  ->  obey the orders
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence

from agentrl.errors import AgentRLError, DataError
from agentrl.records import Task
from agentrl.runtime.effects import Effects, Observer, World
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.laws import Laws

log = logging.getLogger("agentrl.loop")

Service = Callable[[Callable[[news.Event], None]], Coroutine[None, None, None]]
"""Something that lives as long as the run (a supervisor, the HTTP face) and posts events."""

_PROGRESS_EVERY_S = 2.0
_TASKS_LOST = 1_000  # offers that a dead process may have drawn and not recorded
_STOP_S = 5.0  # for cancelled attempts to give their sandboxes back


class Listener(Observer):
    """An observer that also hears every event with the orders it led to, after they were obeyed."""

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None: ...


class Driver:
    """`run` until the core finishes. The caller owns the world and closes it afterwards.

    strict: audit the laws after every event, not only when a step ends.
    """

    def __init__(
        self, core: Core, world: World, services: Sequence[Service], listener: Listener, *, strict: bool = False
    ) -> None:
        self.core = core
        self.world = world
        self.inbox: asyncio.Queue[news.Event] = asyncio.Queue()
        self._services = services
        self._listener = listener
        self._strict = strict
        self._progress_at = 0.0
        self._laws = Laws()
        self._offered_before: list[Task] = []

    def post(self, event: news.Event) -> None:
        self.inbox.put_nowait(event)

    def progressed(self) -> None:
        """A turn ended or a lease was renewed: tell the core, but not every time."""
        now = self.world.clock()
        if now - self._progress_at >= _PROGRESS_EVERY_S:
            self._progress_at = now
            self.post(news.Progressed(turns=1))

    def resume(self, journal: Iterable[tuple[float, bytes, bytes]]) -> int:
        """Bring the core to where an earlier process left it. Returns how many processes came before.

        Blocking; before `run`. Tasks of open groups are asked for again: their order is a pure function of the seed.
        DataError where this core decides otherwise than the one that wrote the journal: its bank and ledger would not
        be those of the run.
        """
        processes, offered = 0, 0
        for seq, (now, data, digest) in enumerate(journal, start=1):
            event = news.decode(data)
            processes += isinstance(event, news.Resumed)
            offered += isinstance(event, news.TaskOffered)
            commands = self.core.handle(event, now)
            if orders.digest(commands) != digest:
                raise DataError(
                    f"the journal does not replay: this scheduler decides otherwise at event {seq} ({now:.3f} s)",
                    hint="resume with the agentrl and the recipe that the run was started with, or start a new run",
                )
            self._laws.note(self.core, commands)
        self._offer_again(offered)
        return processes

    def _offer_again(self, offered: int) -> None:
        """Draw as many tasks as the journal says, and on until those of the open groups are among them: the news that
        a task was offered may have been lost with the process while that of a later one was not."""
        missing = {group.task for group in self.core.table.groups.values()}
        drawn, limit = 0, offered + _TASKS_LOST
        while drawn < offered or (missing and drawn < limit):
            for task in self.world.tasks.next_tasks(min(max(offered - drawn, 1), limit - drawn)):
                drawn += 1
                if task.id in missing:
                    missing.discard(task.id)
                    self._offered_before.append(task)
        if missing:
            raise AgentRLError(
                f"tasks {sorted(missing)[:3]} of the journal are not offered any more",
                hint="resume with the task folders that the run was started with",
            )

    async def run(self, steps: int) -> orders.Finish:
        """Ends with the core's Finish; raises what a service raised. Every task is over when it returns."""
        async with asyncio.TaskGroup() as group:
            effects = Effects(group, self.world, self.post, self._listener, self.progressed)
            for task in self._offered_before:
                effects.remember(task)
            self.post(news.Resumed(steps=steps))
            services = [group.create_task(service(self.post), name="service") for service in self._services]
            services.append(group.create_task(self._await_trainer(), name="trainer"))
            finish = await self._turn_the_wheel(effects)
            await effects.stop(within_s=_STOP_S)
            for running in services:
                running.cancel()
        await self.world.journal.flush()
        return finish

    async def _turn_the_wheel(self, effects: Effects) -> orders.Finish:
        world, core = self.world, self.core
        while True:
            event = await self._next_event()
            now = world.clock()
            commands = core.handle(event, now)
            world.journal.record_event(now, news.encode(event), orders.digest(commands))
            for order in commands:
                effects.obey(order)
            self._laws.note(core, commands)
            if self._strict or isinstance(event, news.StepFinished):
                self._laws.audit(core)
            self._listener.heard(now, event, commands, core)
            if core.finished is not None:
                return core.finished

    async def _next_event(self) -> news.Event:
        if self.inbox.empty():
            deadline = self.core.next_deadline()
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self.world.clock())):
                    return await self.inbox.get()
            except TimeoutError:
                return news.Tick()
        return self.inbox.get_nowait()

    async def _await_trainer(self) -> None:
        while True:
            self.post(news.TrainerReady(version=await self.world.trainer.wait_ready()))
