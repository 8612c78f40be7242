"""Keeps the run's processes up: start, tell the core, watch, tell the core, start again within a budget.

Five signals say that one is gone: its process ended, the link to its host is lost, it does not answer a question asked
every two seconds, a call of the turn loop failed and it does not answer then, or it answers and does not work: it is
not ready, or makes no token while requests run (`stuck.py`). A lost link costs no restart: what was
there is found again, or started again, once the host is back. Each incarnation of an engine has its own epoch, so that
news of an old one is ignored.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from agentrl import ports
from agentrl.errors import AgentRLError, UnavailableError
from agentrl.records import EngineInfo, RankLoad, SandboxHostStatus
from agentrl.runtime.stuck import Stuck
from agentrl.scheduler import events as news

log = logging.getLogger("agentrl.supervisor")

Post = Callable[[news.Event], None]

_PROBE_EVERY_S = 2.0
_PROBE_DEADLINE_S = 5.0
_SIGN_EVERY_S = 10.0  # while something starts
_PROBES_LOST = 3  # in a row, before an engine whose process lives is given up


class Running(Protocol):
    """A started service. `wait_ended` returns why its process ended; `stop` is idempotent."""

    async def wait_ended(self) -> str: ...

    async def stop(self) -> None: ...


class RunningEngine(Running, Protocol):
    @property
    def engine(self) -> ports.Engine: ...

    @property
    def info(self) -> EngineInfo: ...


class RunningHost(Running, Protocol):
    @property
    def host(self) -> ports.SandboxHost: ...

    @property
    def capacity(self) -> int: ...


class Link(Protocol):
    """The part of ports.Host that says whether the host can be reached."""

    @property
    def name(self) -> str: ...

    @property
    def up(self) -> bool: ...

    async def wait_link(self, *, up: bool) -> str: ...


R = TypeVar("R", bound=Running)


class Keeper(ABC, Generic[R]):
    """One slot of the run's fleet. `run` lives as long as the run does, one incarnation after the other.

    link: to the host that its incarnations are on; None: they are on this machine.
    """

    def __init__(
        self, name: str, start: Callable[[], Awaitable[R]], post: Post, *, restarts: int, link: Link | None = None
    ) -> None:
        self.name = name
        self._link = link
        self._start = start
        self._post = post
        self._restarts = restarts
        self._running: R | None = None
        self._given_up = asyncio.Event()
        self._why = ""

    @abstractmethod
    def _came_up(self, running: R) -> None:
        """Make it known: the registry, then the core."""

    @abstractmethod
    def _went_down(self, reason: str) -> None: ...

    @abstractmethod
    async def _ask(self, running: R) -> None:
        """A question that only a live one answers. An AgentRLError where it does not."""

    def restart(self, reason: str) -> None:
        """Give the present incarnation up."""
        self._why = reason
        self._given_up.set()

    async def alive(self) -> bool:
        """Whether it answers now; one that does not is given up at once, so that its end is news soon."""
        running = self._running
        if running is None:
            return False
        try:
            await self._ask(running)
        except AgentRLError as exc:
            if running is self._running:
                self.restart(str(exc))
            return False
        return True

    async def run(self) -> None:
        left, first = self._restarts, True
        while left >= 0:
            running = await self._started(first=first)
            first = False
            if running is not None:
                reason = await self._serve(running)
                log.warning("%s: %s; %d restarts left", self.name, reason, left)
            if self._lost:
                await self._until_back()
            else:
                left -= 1
        log.error("%s stays down: its restarts are spent", self.name)

    @property
    def _lost(self) -> str:
        """The host, while it cannot be reached."""
        return self._link.name if self._link is not None and not self._link.up else ""

    async def _until_back(self) -> None:
        assert self._link is not None
        reason = await self._link.wait_link(up=True)
        log.warning("%s: host %s is back: %s", self.name, self._link.name, reason)

    async def _started(self, *, first: bool) -> R | None:
        try:
            return await self._start_in_sight()
        except AgentRLError as exc:
            if first:
                raise  # a run that cannot even start says so at once
            log.error("%s did not start: %s", self.name, exc)
            return None

    async def _serve(self, running: R) -> str:
        """Until the incarnation is over; why."""
        self._running = running
        self._given_up.clear()
        self._came_up(running)
        reason = "cancelled"
        try:
            reason = await self._watch(running)
        finally:
            self._running = None
            self._went_down(reason)
            await self._stop(running)
        return reason

    async def _stop(self, running: R) -> None:
        try:
            await running.stop()
        except AgentRLError as exc:
            if self._link is None:
                raise
            log.warning("%s: it could not be stopped on host %s: %s", self.name, self._link.name, exc)

    async def _start_in_sight(self) -> R:
        """A start has its own deadline and may take longer than a stall: meanwhile the core hears that it goes on."""
        starting = asyncio.ensure_future(self._start())
        try:
            while not (await asyncio.wait({starting}, timeout=_SIGN_EVERY_S))[0]:
                self._post(news.Progressed(turns=0))
            return starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _watch(self, running: R) -> str:
        """Returns why the incarnation is over."""
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(running.wait_ended(), name=f"{self.name} process")
            given_up = group.create_task(self._given_up.wait(), name=f"{self.name} given up")
            probes = group.create_task(self._probe(running), name=f"{self.name} probes")
            cut = group.create_task(self._cut(), name=f"{self.name} link")
            done, pending = await asyncio.wait({ended, given_up, probes, cut}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        if cut in done:  # it explains the others
            return cut.result()
        if ended in done:
            return ended.result()
        return self._why if given_up in done else str(probes.result())

    async def _cut(self) -> str:
        if self._link is None:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        return f"host {self._link.name} is lost: {await self._link.wait_link(up=False)}"

    async def _probe(self, running: R) -> str:
        lost = 0
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            try:
                await self._ask(running)
                lost = 0
            except AgentRLError as exc:
                lost += 1
                if lost == _PROBES_LOST:
                    return f"no answer to {lost} questions: {exc}"


class EngineKeeper(Keeper[RunningEngine]):
    """`registry` is what the turn loop looks engines up in. first_epoch: above all of earlier processes of this run.
    stuck_s, unready_s: as in `stuck.Stuck`; both 0: only its answers count."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[RunningEngine]],
        registry: dict[str, ports.Engine],
        post: Post,
        *,
        first_epoch: int,
        restarts: int,
        link: Link | None = None,
        stuck_s: float = 0.0,
        unready_s: float = 0.0,
    ) -> None:
        super().__init__(name, start, post, restarts=restarts, link=link)
        self._registry = registry
        self._epoch = first_epoch
        self._said: tuple[RankLoad, ...] = ()
        self._limits = stuck_s, unready_s
        self._stuck = Stuck()

    def _came_up(self, running: RunningEngine) -> None:
        self._registry[self.name] = running.engine
        self._stuck = Stuck(stuck_s=self._limits[0], unready_s=self._limits[1])
        info = running.info
        self._post(
            news.EngineUp(
                engine=self.name,
                epoch=self._epoch,
                version=info.version,
                ranks=info.ranks,
                slots=max(1, info.slots // info.ranks),
                kv_tokens=max(1, info.kv_tokens // info.ranks),
                host=self._link.name if self._link is not None else "",
            )
        )

    def _went_down(self, reason: str) -> None:
        self._registry.pop(self.name, None)
        self._post(news.EngineDown(engine=self.name, epoch=self._epoch, reason=reason, link=self._lost))
        self._epoch += 1

    async def _ask(self, running: RunningEngine) -> None:
        loads = tuple(await running.engine.loads(deadline_s=_PROBE_DEADLINE_S))
        if any(self._limits):
            await self._look(running, loads)
        if loads != self._said:
            self._said = loads
            self._post(news.EngineLoads(engine=self.name, epoch=self._epoch, loads=loads))

    async def _look(self, running: RunningEngine, loads: tuple[RankLoad, ...]) -> None:
        ready = await running.engine.ready(deadline_s=_PROBE_DEADLINE_S)
        tokens = await running.engine.generated_tokens(deadline_s=_PROBE_DEADLINE_S)
        now = asyncio.get_running_loop().time()
        why = self._stuck.look(now, ready=ready, loads=loads, tokens=tokens)
        if why and running is self._running:
            self.restart(why)


class HostKeeper(Keeper[RunningHost]):
    """One sandbox daemon. What it says of its lanes is news where it has changed."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[RunningHost]],
        registry: dict[str, ports.SandboxHost],
        post: Post,
        *,
        restarts: int,
        link: Link | None = None,
    ) -> None:
        super().__init__(name, start, post, restarts=restarts, link=link)
        self._registry = registry
        self._said: SandboxHostStatus | None = None

    def _came_up(self, running: RunningHost) -> None:
        self._registry[self.name] = running.host
        self._post(news.SandboxHostUp(host=self.name, capacity=running.capacity))

    def _went_down(self, reason: str) -> None:
        self._registry.pop(self.name, None)
        self._said = None
        self._post(news.SandboxHostDown(host=self.name, reason=reason, link=self._lost))

    async def _ask(self, running: RunningHost) -> None:
        said = await running.host.status(deadline_s=_PROBE_DEADLINE_S)
        if running is self._running and said != self._said:
            self._said = said
            self._post(news.SandboxHostLoads(host=self.name, said=said))


async def keep_trainer(start: Callable[[], Awaitable[Running]], *, restarts: int) -> None:
    """The trainer's process. What it was working on stays on the desk; it comes back to it."""
    reason = ""
    for left in range(restarts, -1, -1):
        running = await start()
        try:
            reason = await running.wait_ended()
        finally:
            await running.stop()
        log.warning("trainer: %s; %d restarts left", reason, left)
    raise UnavailableError(f"the trainer ended {restarts + 1} times, last: {reason}", hint="see logs/trainer.log")
