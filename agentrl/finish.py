"""Work that goes on to its end though whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_LAST_S = 1.0  # for what is cancelled to end


async def finish(work: Awaitable[T], *, deadline_s: float | None = None) -> T:
    """Its result. A cancellation is let through once the work is over. TimeoutError where it is not within deadline_s:
    then it is cancelled; None: it has a deadline of its own."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    ends = None if deadline_s is None else loop.time() + deadline_s
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (ends is None or loop.time() < ends):
        try:
            await asyncio.wait({task}, timeout=None if ends is None else ends - loop.time())
        except asyncio.CancelledError as exc:
            cancelled = exc
    late = not task.done()
    if late:
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=_LAST_S)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if task.done() and not task.cancelled():
        task.exception()  # seen: a cancellation is what the caller must hear
    if cancelled is not None:
        raise cancelled
    if late:
        raise TimeoutError
    return task.result()
