"""What becomes of an engine that a swap leaves torn, or whose weights are not those of the others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from agentrl.errors import AgentRLError, DataError, EngineLost, EngineTorn
from agentrl.records import EngineInfo, LoadReport, Version
from agentrl.runtime.agreement import Checksums
from agentrl.runtime.effects import Effects, Observer, World
from agentrl.runtime.supervisor import EngineKeeper
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news

INFO = EngineInfo(
    kind="embedded", software="0", version=Version(0), ranks=1, slots=4, context_tokens=1024, kv_tokens=1024
)


class Engine:
    """Takes versions, each with the checksum or the failure that it was given."""

    def __init__(self, outcome: str | AgentRLError) -> None:
        self.outcome = outcome

    async def swap(self, path: str, version: Version, **_: Any) -> LoadReport:
        if isinstance(self.outcome, AgentRLError):
            raise self.outcome
        return LoadReport(version=version, stage_s=0.0, pause_s=0.1, lost_tokens=0, checksum=self.outcome)

    async def generated_tokens(self, *, deadline_s: float) -> int:
        return 0

    async def loads(self, *, deadline_s: float) -> list[Any]:
        return []


class Running:
    def __init__(self, engine: Engine, stopped: asyncio.Event) -> None:
        self.engine = engine
        self.info = INFO
        self.stopped = stopped

    async def wait_ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        self.stopped.set()


class Weights:
    def path(self, version: Version) -> str:
        return f"/v{version}"

    def prune(self, keep: int) -> None: ...


class Fleet:
    """Engines under real keepers, and what the core would hear of them."""

    def __init__(self, group: asyncio.TaskGroup, outcomes: dict[str, list[str | AgentRLError]]) -> None:
        self.heard: asyncio.Queue[news.Event] = asyncio.Queue()
        self.world = cast(Any, World)(
            player=None,
            tasks=None,
            journal=None,
            weights=Weights(),
            trainer=None,
            clock=lambda: 0.0,
            keep_versions=1,
            admin_s=1.0,
            checksums=Checksums(),
        )
        self.effects = Effects(group, self.world, self.heard.put_nowait, Observer(), lambda: None)
        self.stopped = {name: asyncio.Event() for name in outcomes}
        self.keepers = [group.create_task(self._keeper(name, outcomes[name]).run()) for name in outcomes]

    def _keeper(self, name: str, outcomes: list[str | AgentRLError]) -> EngineKeeper:
        async def start() -> Any:
            return Running(Engine(outcomes.pop(0)), self.stopped[name])

        keeper = EngineKeeper(name, start, self.world.engines, self.heard.put_nowait, first_epoch=0, restarts=3)
        self.world.keepers[name] = keeper
        return keeper

    async def until(self, kind: type[news.Event], engine: str) -> Any:
        while True:
            event = await self.heard.get()
            if isinstance(event, kind) and getattr(event, "engine", "") == engine:
                return event

    def swap(self, engine: str, version: int, epoch: int = 0) -> None:
        self.effects.obey(orders.SwapWeights(engine=engine, epoch=epoch, version=Version(version)))

    def end(self) -> None:
        for keeper in self.keepers:
            keeper.cancel()


def play(outcomes: dict[str, list[str | AgentRLError]], scenario: Any) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            fleet = Fleet(group, outcomes)
            for name in outcomes:
                await fleet.until(news.EngineUp, name)
            await scenario(fleet)
            fleet.end()

    asyncio.run(all_of_it())


def test_a_torn_engine_is_started_anew() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.swap("e0", 1)
        failed = await fleet.until(news.EngineLoadFailed, "e0")
        assert (failed.epoch, failed.version) == (0, 1)
        down = await fleet.until(news.EngineDown, "e0")
        assert "in part" in down.reason
        assert (await fleet.until(news.EngineUp, "e0")).epoch == 1
        assert fleet.stopped["e0"].is_set()

    play({"e0": [EngineTorn("version 1 arrived in part"), "sum"]}, scenario)


def test_of_two_that_differ_the_later_one_is_started_anew_and_then_agrees() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.swap("e0", 1)
        await fleet.until(news.EngineLoaded, "e0")
        fleet.swap("e1", 1)
        failed = await fleet.until(news.EngineLoadFailed, "e1")
        assert "not those of e0" in failed.detail
        assert "not those of e0" in (await fleet.until(news.EngineDown, "e1")).reason
        assert not fleet.stopped["e0"].is_set()
        assert (await fleet.until(news.EngineUp, "e1")).epoch == 1
        fleet.swap("e1", 1, epoch=1)
        assert (await fleet.until(news.EngineLoaded, "e1")).epoch == 1

    play({"e0": ["a"], "e1": ["b", "a"]}, scenario)


@pytest.mark.parametrize("failure", [EngineLost("gone"), DataError("refused")], ids=["lost", "refused"])
def test_what_failed_without_tearing_is_news_and_no_more(failure: AgentRLError) -> None:
    """Whether that engine still answers is its keeper's question; what it serves is what it served."""

    async def scenario(fleet: Fleet) -> None:
        fleet.swap("e0", 1)
        await fleet.until(news.EngineLoadFailed, "e0")
        assert "e0" in fleet.world.engines
        assert not fleet.stopped["e0"].is_set()

    play({"e0": [failure]}, scenario)
