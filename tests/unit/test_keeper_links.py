"""Keepers of what is on other hosts: a lost link is news at once, costs no restart, and its end starts things again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agentrl.errors import UnavailableError
from agentrl.records import SandboxHostStatus
from agentrl.runtime.supervisor import HostKeeper
from agentrl.scheduler import events as news


class Link:
    name = "h2"

    def __init__(self) -> None:
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self.mend()

    @property
    def up(self) -> bool:
        return self._up.is_set()

    async def wait_link(self, *, up: bool) -> str:
        await (self._up if up else self._down).wait()
        return "connected" if up else "no answer for 3 s"

    def cut(self) -> None:
        self._up.clear()
        self._down.set()

    def mend(self) -> None:
        self._down.clear()
        self._up.set()


class Daemon:
    """A running host and its client in one."""

    capacity = 4

    def __init__(self, link: Link) -> None:
        self._link = link
        self.died = asyncio.Event()
        self.host = self

    async def status(self, *, deadline_s: float) -> SandboxHostStatus:
        if not self._link.up:
            raise UnavailableError("not reachable")
        return SandboxHostStatus(name="h2", backend="process", isolation="none", live=0, lanes=())

    async def wait_ended(self) -> str:
        await self.died.wait()
        return "it ended"

    async def stop(self) -> None:
        if not self._link.up:
            raise UnavailableError("not reachable")


def keep(scenario: Callable[[Link, asyncio.Queue[news.Event], list[Daemon]], object], *, restarts: int) -> None:
    async def main() -> None:
        link, said, started = Link(), asyncio.Queue[news.Event](), list[Daemon]()

        async def start() -> Daemon:
            if not link.up:
                raise UnavailableError("h2 cannot be reached")
            started.append(Daemon(link))
            return started[-1]

        keeper = HostKeeper("h2", start, {}, said.put_nowait, restarts=restarts, link=link)  # type: ignore[arg-type]
        running = asyncio.create_task(keeper.run())
        try:
            await scenario(link, said, started)  # type: ignore[misc]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


async def heard(said: asyncio.Queue[news.Event], kind: type[news.Event]) -> news.Event:
    while not isinstance(event := await said.get(), kind):
        pass
    return event


def test_every_cut_is_named_and_none_costs_a_restart() -> None:
    async def scenario(link: Link, said: asyncio.Queue[news.Event], started: list[Daemon]) -> None:
        await heard(said, news.SandboxHostUp)
        for count in range(1, 4):
            link.cut()
            lost = await heard(said, news.SandboxHostDown)
            assert lost.reason == "host h2 is lost: no answer for 3 s"  # type: ignore[union-attr]
            link.mend()
            await heard(said, news.SandboxHostUp)
            assert len(started) == count + 1

    keep(scenario, restarts=0)


def test_a_process_that_ends_still_costs_one() -> None:
    async def scenario(link: Link, said: asyncio.Queue[news.Event], started: list[Daemon]) -> None:
        for _ in range(2):
            await heard(said, news.SandboxHostUp)
            started[-1].died.set()
            await heard(said, news.SandboxHostDown)
        assert len(started) == 2

    keep(scenario, restarts=1)


def test_a_cut_while_it_starts_again_is_waited_for() -> None:
    async def scenario(link: Link, said: asyncio.Queue[news.Event], started: list[Daemon]) -> None:
        await heard(said, news.SandboxHostUp)
        started[-1].died.set()
        link.cut()  # its end and the cut come together: the cut explains it
        await heard(said, news.SandboxHostDown)
        link.mend()
        await heard(said, news.SandboxHostUp)

    keep(scenario, restarts=0)


def test_a_host_that_cannot_be_reached_at_first_is_an_error() -> None:
    async def main() -> None:
        link = Link()
        link.cut()

        async def start() -> Daemon:
            raise UnavailableError("h2 cannot be reached")

        keeper = HostKeeper("h2", start, {}, lambda event: None, restarts=9, link=link)  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match="h2 cannot be reached"):
            await keeper.run()

    asyncio.run(main())
