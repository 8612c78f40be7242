"""Keeps the run's processes up: start, tell the core, watch, tell the core, start again within a budget.

An engine is watched by three signals: its process, its answer to a load query, and the turn loop's word that a call
failed. A new incarnation has a new epoch, so that news of the old one is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from agentrl import ports
from agentrl.errors import AgentRLError, InfraError, UnavailableError
from agentrl.records import EngineInfo
from agentrl.scheduler import events as news

log = logging.getLogger("agentrl.supervisor")

Post = Callable[[news.Event], None]

_PROBE_EVERY_S = 2.0
_PROBE_DEADLINE_S = 5.0
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


class EngineKeeper:
    """One engine slot of the run. `run` lives as long as the run does; `registry` is what the turn loop looks engines
    up in. first_epoch: above every epoch of earlier processes of this run."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[RunningEngine]],
        registry: dict[str, ports.Engine],
        post: Post,
        *,
        first_epoch: int,
        restarts: int,
    ) -> None:
        self.name = name
        self._start = start
        self._registry = registry
        self._post = post
        self._epoch = first_epoch
        self._restarts = restarts
        self._give_up = asyncio.Event()
        self._why = ""
        self._swapping = False

    def restart(self, reason: str) -> None:
        """Give the present incarnation up."""
        self._why = reason
        self._give_up.set()

    async def alive(self) -> bool:
        """Whether it answers now; where it does not, it is given up at once."""
        engine = self._registry.get(self.name)
        if engine is None:
            return False
        try:
            await engine.loads(deadline_s=_PROBE_DEADLINE_S)
        except InfraError as exc:
            self.restart(str(exc))
            return False
        return True

    async def run(self) -> None:
        for left in range(self._restarts, -1, -1):
            running = await self._started(first=left == self._restarts)
            if running is not None:
                try:
                    reason = await self._watch(running)
                finally:
                    self._registry.pop(self.name, None)
                    await running.stop()
                log.warning("engine %s: %s; %d restarts left", self.name, reason, left)
                self._post(news.EngineDown(engine=self.name, epoch=self._epoch, reason=reason))
            self._epoch += 1
        log.error("engine %s stays down: its restarts are spent", self.name)

    async def _started(self, *, first: bool) -> RunningEngine | None:
        try:
            running = await self._start()
        except AgentRLError as exc:
            if first:
                raise  # a run that cannot even start says so at once
            log.error("engine %s did not start: %s", self.name, exc)
            return None
        self._give_up.clear()
        self._registry[self.name] = running.engine
        info = running.info
        self._post(
            news.EngineUp(
                engine=self.name,
                epoch=self._epoch,
                version=info.version,
                ranks=info.ranks,
                slots=max(1, info.slots // info.ranks),
                kv_tokens=max(1, info.kv_tokens // info.ranks),
            )
        )
        return running

    async def _watch(self, running: RunningEngine) -> str:
        """Returns why the incarnation is over."""
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(running.wait_ended(), name=f"{self.name} process")
            given_up = group.create_task(self._give_up.wait(), name=f"{self.name} given up")
            probes = group.create_task(self._probe(running.engine), name=f"{self.name} probes")
            done, pending = await asyncio.wait({ended, given_up, probes}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        if ended in done:
            return ended.result()
        return self._why if given_up in done else str(probes.result())

    async def _probe(self, engine: ports.Engine) -> str:
        lost = 0
        said = None
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            try:
                loads = tuple(await engine.loads(deadline_s=_PROBE_DEADLINE_S))
            except InfraError as exc:
                lost += 1
                if lost == _PROBES_LOST:
                    return f"no answer to {lost} load queries: {exc}"
                continue
            lost = 0
            if loads != said:
                said = loads
                self._post(news.EngineLoads(engine=self.name, epoch=self._epoch, loads=loads))


async def keep_host(
    name: str,
    start: Callable[[], Awaitable[RunningHost]],
    registry: dict[str, ports.SandboxHost],
    post: Post,
    *,
    restarts: int,
) -> None:
    """One sandbox daemon for the life of the run. A first start that fails ends the run with its reason."""
    for left in range(restarts, -1, -1):
        try:
            running = await start()
        except AgentRLError:
            if left == restarts:
                raise
            log.exception("sandbox host %s did not start", name)
            continue
        registry[name] = running.host
        post(news.SandboxHostUp(host=name, capacity=running.capacity))
        try:
            reason = await running.wait_ended()
        finally:
            registry.pop(name, None)
            await running.stop()
        log.warning("sandbox host %s: %s; %d restarts left", name, reason, left)
        post(news.SandboxHostDown(host=name, reason=reason))
    log.error("sandbox host %s stays down: its restarts are spent", name)


async def keep_trainer(start: Callable[[], Awaitable[Running]], post: Post, *, restarts: int) -> None:
    """The trainer's process. What it was working on stays on the desk; it comes back to it."""
    for left in range(restarts, -1, -1):
        running = await start()
        try:
            reason = await running.wait_ended()
        finally:
            with contextlib.suppress(ProcessLookupError):
                await running.stop()
        log.warning("trainer: %s; %d restarts left", reason, left)
    raise UnavailableError(f"the trainer ended {restarts + 1} times, last: {reason}", hint="see logs/trainer.log")
