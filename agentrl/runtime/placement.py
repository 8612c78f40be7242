"""Where an attempt's next turn goes: a cell that the scheduler moves and the turn loop reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from random import Random

from agentrl.errors import DeadlineError
from agentrl.records import Place


class Cell:
    """ports.Placement of one attempt. `alive(engine)` asks the engine's supervisor whether it still serves."""

    def __init__(self, place: Place, alive: Callable[[str], Awaitable[bool]]) -> None:
        self._place = place
        self._alive = alive
        self._moved = asyncio.Event()

    @property
    def place(self) -> Place:
        return self._place

    def move(self, place: Place) -> None:
        self._place = place
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait_moved(self, away_from: Place, *, deadline_s: float) -> Place:
        """The next place, or the same one where its engine proves to be well after all."""
        if self._place != away_from:
            return self._place
        moved = self._moved
        if await self._alive(away_from.engine):
            return self._place
        try:
            async with asyncio.timeout(deadline_s):
                await moved.wait()
        except TimeoutError as exc:
            raise DeadlineError(f"no engine took over from {away_from} within {deadline_s:g} s") from exc
        return self._place


class Scatter:
    """ports.Placement that sends every call to some rank of some engine: a balancer without memory, for benches.

    engines: names, and each has `ranks`.
    """

    def __init__(self, engines: Collection[str], ranks: int, rng: Random) -> None:
        self._engines = engines
        self._ranks = ranks
        self._rng = rng

    @property
    def place(self) -> Place:
        name = self._rng.choice(sorted(self._engines) or [""])  # none: the call fails, as with any engine that is lost
        return Place(name, self._rng.randrange(self._ranks))

    async def wait_moved(self, away_from: Place, *, deadline_s: float) -> Place:
        return self.place
