"""The containers of one daemon: kept for one box after another, made when none is idle, removed when too many."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from agentrl.errors import AgentRLError, InfraError, UnavailableError
from agentrl.recipe import schema
from agentrl.sandbox.backends.container import Container, Kind
from agentrl.sandbox.backends.warm import Pace, Shelf

PROBE = "probe"  # label of what is never kept

_log = logging.getLogger(__name__)


class Pool:
    """make: a new container. remove: one by its name. Close with `aclose`, once nobody takes any more."""

    def __init__(
        self,
        settings: schema.Docker,
        make: Callable[[Kind], Awaitable[Container]],
        remove: Callable[[str], Awaitable[None]],
    ) -> None:
        self._warm = settings.warm
        self._make_one, self._remove_one = make, remove
        self._made: set[Container] = set()
        self._shelf: Shelf[Kind, Container] = Shelf(settings.warm)
        self._pace = Pace(settings.starts, settings.starts_per_s)
        self._waiting = 0  # for a container, with none in advance
        self.in_advance: set[asyncio.Task[None]] = set()
        self.removals: set[asyncio.Task[None]] = set()
        self._closing = False

    async def take(self, kind: Kind) -> tuple[Container, bool]:
        """An idle one, else a new one, and whether it is new. It is the caller's until `release` or `discard`."""
        if kept := self._shelf.take(kind):
            return kept, False
        self._waiting += 1
        try:
            async with self._pace.turn():
                if kept := self._shelf.take(kind):  # given back while we waited
                    return kept, False
                made = await self._make(kind)
        finally:
            self._waiting -= 1
        self._prepare(kind)
        return made, True

    async def _make(self, kind: Kind) -> Container:
        began = time.monotonic()
        made = await self._make_one(kind)
        self._made.add(made)
        _log.info("container %s made in %.2f s", made.name, time.monotonic() - began)
        return made

    def _prepare(self, kind: Kind) -> None:
        """Whoever comes next shall not wait as this one did: one container in advance, while there is room."""
        room = self._warm - len(self._shelf) - len(self.in_advance)
        if room > 0 and not self._closing and kind.label != PROBE:
            self._later(self._make_spare(kind), self.in_advance)

    async def _make_spare(self, kind: Kind) -> None:
        try:
            async with self._pace.turn():
                if not self._waiting:  # whoever waits comes first, and will ask for one in advance itself
                    self._give_back(await self._make(kind))
        except (AgentRLError, OSError) as e:
            _log.warning("no container in advance: %s", e)

    async def release(self, used: Container) -> None:
        """Nothing of the box remains when this returns; its container waits for the next one, if there is room."""
        try:
            await used.renew()
        except (OSError, InfraError):
            self.discard(used)
        else:
            self._give_back(used)

    def _give_back(self, ready: Container) -> None:
        keep = not self._closing and ready.kind.label != PROBE
        for spare in self._shelf.put(ready.kind, ready) if keep else [ready]:
            self.discard(spare)

    def discard(self, one: Container) -> None:
        """Its init ends with its socket, and all else in it; what the engine keeps of it goes soon."""
        self._made.discard(one)
        one.control.close()
        self._later(self._remove(one.name), self.removals)

    async def _remove(self, name: str) -> None:
        try:
            await self._remove_one(name)
        except (InfraError, UnavailableError) as e:
            _log.warning("%s: left to the engine, and to gc: %s", name, e)

    def _later(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def aclose(self) -> None:
        """Every init ends; whatever was being removed is."""
        self._closing = True
        for task in list(self.in_advance):
            task.cancel()
        if self.in_advance:
            await asyncio.wait(self.in_advance)
        for one in self._made:
            one.control.close()
        if self.removals:
            await asyncio.wait(self.removals)
