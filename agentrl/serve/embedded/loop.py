"""The one thread that computes. It owns the core; everybody else hands it small functions to run between two steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from agentrl.serve.embedded.core import Core

T = TypeVar("T")


class StepLoop:
    """start() once, from the event loop; close() waits for the thread. on_crash runs on the event loop."""

    def __init__(self, core: Core, on_crash: Callable[[BaseException], None]) -> None:
        self.core = core
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._events: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._events = asyncio.get_running_loop()
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run between two steps; its result or its exception comes back."""
        return await self.call_back(lambda reply: reply(function()))

    async def call_back(self, function: Callable[[Callable[[T], None]], None]) -> T:
        """As `call`, for functions that answer later: they are given the function to answer with."""
        events = asyncio.get_running_loop()
        future: asyncio.Future[T] = events.create_future()

        def settle(result: T) -> None:
            if not future.done():
                future.set_result(result)

        def fail(exc: Exception) -> None:
            if not future.done():
                future.set_exception(exc)

        def run() -> None:
            try:
                function(lambda result: self.tell(lambda: settle(result)))
            except Exception as exc:  # the caller's own mistake, handed back to the caller
                self.tell(lambda exc=exc: fail(exc))  # type: ignore[misc]

        self.post(run)
        return await future

    def post(self, function: Callable[[], None]) -> None:
        """Run between two steps; an exception there ends the engine."""
        self._inbox.put(function)

    def tell(self, function: Callable[[], None]) -> None:
        """From the thread: run something on the event loop."""
        assert self._events is not None
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(function)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._drain():
                    if self.core.busy:
                        self.core.step()
        except BaseException as exc:  # a broken step loop must take the process with it, or callers wait for ever
            self.tell(lambda exc=exc: self._on_crash(exc))  # type: ignore[misc]

    def _drain(self) -> bool:
        """Run what was handed in; waits where there is nothing to compute. False at the end."""
        while not (self.core.busy and self._inbox.empty()):
            function = self._inbox.get()
            if function is None:
                return False
            function()
        return True
