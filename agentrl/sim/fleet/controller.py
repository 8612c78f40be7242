"""The one thread that plays all attempts: what it does for one of them, the others wait for."""

from __future__ import annotations

import asyncio

from agentrl.recipe.sim import Controller as Plan
from agentrl.sim.fleet.host import HostModel


class Controller:
    """plan: what it does for whom. host: where it shares the CPUs."""

    def __init__(self, host: HostModel, plan: Plan) -> None:
        self._host = host
        self._plan = plan
        self._thread = asyncio.Lock()  # in order of arrival

    async def start(self) -> None:
        if self._plan.start_s:
            await asyncio.sleep(self._plan.start_s)

    async def turn(self) -> None:
        await self._work(self._plan.turn_s)

    async def attempt(self) -> None:
        await self._work(self._plan.attempt_s)

    async def _work(self, cpu_s: float) -> None:
        if cpu_s:
            async with self._thread:
                await self._host.compute(cpu_s)
