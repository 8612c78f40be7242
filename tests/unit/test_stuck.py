"""An engine that answers and does not work is given up; one that works slowly, or is paused, is not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import EngineInfo, RankLoad, Version
from agentrl.runtime.stuck import Stuck
from agentrl.runtime.supervisor import EngineKeeper
from agentrl.scheduler import events as news
from agentrl.sim.clock import run

STUCK_S, UNREADY_S = 60.0, 240.0
Moment = tuple[bool, int, int, int]  # ready, running, KV tokens, tokens made


def load(running: int, used: int = 0) -> RankLoad:
    return RankLoad(rank=0, running=running, waiting=0, kv_used_tokens=used, kv_total_tokens=100)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), max_size=60))
def test_it_is_given_up_when_nothing_moved_for_as_long_as_it_may(moments: list[Moment]) -> None:
    """Against the words of the rule: over the last stuck_s it was ready, had requests, and always said the same."""
    watch = Stuck(stuck_s=10.0, unready_s=20.0)
    for index, (ready, running, used, tokens) in enumerate(moments):
        why = watch.look(2.0 * index, ready=ready, loads=[load(running, used)], tokens=tokens)
        last, before = moments[max(0, index - 5) : index + 1], moments[max(0, index - 10) : index + 1]
        still = len(last) == 6 and len({moment[1:] for moment in last}) == 1 and all(m[0] and m[1] for m in last[1:])
        unready = len(before) == 11 and not any(moment[0] for moment in before[1:])
        assert bool(why) == (still or unready), (index, why)
        if why:
            break


@dataclass
class Engine:
    """A running engine and its client in one. wedged: it answers, and makes nothing."""

    version: int
    wedged: asyncio.Event = field(default_factory=asyncio.Event)
    paused: bool = False
    stopped: bool = False
    made: int = 0

    @property
    def engine(self) -> Any:
        return self

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            kind="fake", software="0", version=Version(self.version), ranks=1, slots=4, context_tokens=9, kv_tokens=9
        )

    async def loads(self, *, deadline_s: float) -> list[RankLoad]:
        return [load(3)]

    async def ready(self, *, deadline_s: float) -> bool:
        return not self.paused

    async def generated_tokens(self, *, deadline_s: float) -> int:
        self.made += not self.wedged.is_set()
        return self.made

    async def wait_ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        self.stopped = True


def test_a_wedged_engine_leaves_the_registry_is_stopped_and_comes_back_with_what_is_served_now() -> None:
    async def main() -> None:
        said = asyncio.Queue[news.Event]()
        started: list[Engine] = []
        registry: dict[str, Any] = {}

        async def start() -> Engine:
            started.append(Engine(version=len(started)))
            return started[-1]

        keeper = EngineKeeper(
            "e0", start, registry, said.put_nowait, first_epoch=0, restarts=1, stuck_s=STUCK_S, unready_s=UNREADY_S
        )
        running = asyncio.create_task(keeper.run())
        first = await up(said)
        await asyncio.sleep(10 * STUCK_S)  # works
        assert not started[0].stopped
        started[0].paused, before = True, asyncio.get_running_loop().time()
        started[0].wedged.set()
        await asyncio.sleep(2 * STUCK_S)  # paused for new weights
        assert not started[0].stopped
        started[0].paused = False
        down = await heard(said, news.EngineDown)
        assert "3 requests run, no token for 60 s" in down.reason
        assert asyncio.get_running_loop().time() - before < 3 * STUCK_S + 10
        again = await up(said)
        assert started[0].stopped
        assert registry["e0"] is started[1]
        assert (first.version, again.version, again.epoch) == (0, 1, first.epoch + 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(main())


async def heard(said: asyncio.Queue[news.Event], kind: type[Any]) -> Any:
    while not isinstance(event := await said.get(), kind):
        pass
    return event


async def up(said: asyncio.Queue[news.Event]) -> news.EngineUp:
    found: news.EngineUp = await heard(said, news.EngineUp)
    return found
