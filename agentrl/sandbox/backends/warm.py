"""Containers kept ready, and the pace at which new ones are made."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Shelf(Generic[K, V]):
    """Idle things by kind, `cap` of them in all; of more, those of the kind unused for longest are too many."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._idle: OrderedDict[K, list[V]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, kind: K) -> V | None:
        """The one used last: its pages are still in memory."""
        things = self._idle.get(kind)
        if not things:
            return None
        self._idle.move_to_end(kind)
        thing = things.pop()
        if not things:
            del self._idle[kind]
        return thing

    def put(self, kind: K, thing: V) -> list[V]:
        """Returns what is too many now: the caller ends it."""
        self._idle.setdefault(kind, []).append(thing)
        self._idle.move_to_end(kind)
        spare: list[V] = []
        while len(self) > self.cap:
            oldest = next(iter(self._idle))
            spare.append(self._idle[oldest].pop(0))
            if not self._idle[oldest]:
                del self._idle[oldest]
        return spare


class Pace:
    """At most `at_once` at a time and `per_s` a second, unevenly: a hundred conversations that begin together must not
    hit the engine in one beat."""

    def __init__(self, at_once: int, per_s: float, seed: int | None = None) -> None:
        self._gate = asyncio.Semaphore(at_once)
        self._gap_s = 1.0 / per_s
        self._next = 0.0
        self._random = random.Random(seed)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._gate:
            now = asyncio.get_running_loop().time()
            at = max(now, self._next)
            self._next = at + self._gap_s * self._random.uniform(0.5, 1.5)
            await asyncio.sleep(at - now)
            yield
