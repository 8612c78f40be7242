"""A virtual-time event loop: waiting costs nothing, and a hang is an error that names who waits.

Selecting with a time-out advances the clock by it instead of sleeping; selecting without one, with nothing ready, is a
proven deadlock. Only for code that does no real IO. Uses two private attributes of asyncio's loop
(`_selector`, `_ready`), so it is kept this small and tested.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits for something that nothing will ever do."""


class _InstantSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(_waiters())
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """At once, in this thread: blocking work takes no virtual time, and a real thread would need a real clock."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:
            done.set_exception(exc)
        return done


def _waiters() -> str:
    names = sorted(task.get_name() for task in asyncio.all_tasks() if not task.done())
    return f"nothing can happen any more; waiting: {', '.join(names) or 'nobody'}"


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on a fresh virtual loop that starts at time 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
