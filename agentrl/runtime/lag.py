"""How late the run's own event loop is. All turn loops live in it: what blocks it slows every conversation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

_EVERY_S = 0.25
_WINDOW_S = 10.0


class LoopLag:
    """`watch` is a service of the run; `said` hears how late each look was, in seconds."""

    def __init__(self, said: Callable[[float], None] = lambda late: None) -> None:
        self._said = said
        self._looks: deque[tuple[float, float]] = deque(maxlen=int(_WINDOW_S / _EVERY_S))

    @property
    def worst_s(self) -> float:
        """Of the last ten seconds."""
        return max((late for _, late in self._looks), default=0.0)

    async def watch(self, _: Callable[[Any], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            now = loop.time()
            late = max(0.0, now - due)
            self._looks.append((now, late))
            self._said(late)
