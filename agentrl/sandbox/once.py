"""Work done once per request id: a repeated id joins what runs, or gets the answer that was given."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from agentrl.errors import AgentRLError, InfraError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Work(Generic[T]):
    """One request. waiters: callers that still want the answer."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], tasks: asyncio.TaskGroup, name: str) -> None:
        self.waiters = 0
        self.task = tasks.create_task(_settle(coroutine, name), name=name)


async def _settle(coroutine: Coroutine[Any, Any, T], name: str) -> tuple[T] | Exception:
    """The value or the error, as data: an error belongs to those who asked, not to the task group."""
    try:
        return (await coroutine,)
    except (AgentRLError, OSError) as error:
        return error
    except Exception as error:
        _log.exception("%s failed in a way it should not", name)
        return error


class Once:
    """Remembers the last `keep` answers. Work nobody waits for any more is cancelled: its client is gone."""

    def __init__(self, tasks: asyncio.TaskGroup, *, keep: int) -> None:
        self._tasks = tasks
        self._keep = keep
        self._works: OrderedDict[str, _Work[Any]] = OrderedDict()

    async def do(self, request_id: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of `start()`, called only for an id not seen before. InfraError where it was cancelled."""
        work: _Work[T] | None = self._works.get(request_id)
        if work is None:
            work = self._works[request_id] = _Work(start(), self._tasks, f"request {request_id}")
            self._forget_oldest()
        work.waiters += 1
        try:
            await asyncio.wait([work.task])
        finally:
            work.waiters -= 1
            if not work.waiters:
                work.task.cancel()
        if work.task.cancelled():
            raise InfraError(f"request {request_id} was cancelled: its client went away or its sandbox was closed")
        outcome = work.task.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[0]

    async def cancel(self) -> None:
        """End all that runs and wait until it has."""
        running = [work.task for work in self._works.values() if not work.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _forget_oldest(self) -> None:
        for request_id in list(self._works)[: max(0, len(self._works) - self._keep)]:
            if self._works[request_id].task.done():
                del self._works[request_id]
