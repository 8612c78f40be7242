"""The thread that computes: calls run between steps, errors go to the caller, a broken step ends the engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from agentrl.serve.embedded.core import Core
from agentrl.serve.embedded.loop import StepLoop


class Counting:
    """A core that only counts its steps, and breaks at `breaks_at`."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.busy = False
        self.steps = 0
        self.breaks_at = breaks_at

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.breaks_at:
            raise RuntimeError("broken")


def loop_of(core: Counting, crashes: list[BaseException] | None = None, crashed: Any = lambda: None) -> StepLoop:
    def on_crash(exc: BaseException) -> None:
        assert crashes is not None
        crashes.append(exc)
        crashed()

    return StepLoop(cast(Core, core), on_crash)


def test_calls_run_in_order_between_steps_and_errors_come_back() -> None:
    async def check() -> None:
        core = Counting()
        loop = loop_of(core)
        loop.start()
        try:
            core_busy = await loop.call(lambda: setattr(core, "busy", True) or core.steps)
            assert core_busy == 0
            assert await loop.call(lambda: core.steps) >= 0
            assert await loop.call(lambda: setattr(core, "busy", False) or "idle") == "idle"
            before = core.steps
            with pytest.raises(ValueError, match="mine"):
                await loop.call(lambda: (_ for _ in ()).throw(ValueError("mine")))
            assert await loop.call(lambda: core.steps) == before
        finally:
            loop.close()

    asyncio.run(check())


def test_a_broken_step_is_reported_once() -> None:
    async def check() -> None:
        core, crashes, crashed = Counting(breaks_at=2), list[BaseException](), asyncio.Event()
        loop = loop_of(core, crashes, crashed.set)
        loop.start()
        loop.post(lambda: setattr(core, "busy", True))
        async with asyncio.timeout(5):
            await crashed.wait()
        loop.close()
        assert [str(exc) for exc in crashes] == ["broken"]

    asyncio.run(check())
