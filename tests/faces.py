"""The run's real HTTP face, desk and weight store, with a test in the driver's place; and a line to it that breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.publish.inbox import WeightInbox
from agentrl.publish.store import DiskWeightStore
from agentrl.records import StepReport, Version, WeightsManifest
from agentrl.runtime.api import Face
from agentrl.runtime.desk import TrainerDesk
from agentrl.runtime.effects import World
from agentrl.runtime.loop import Driver, Listener
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim
from tests.toy_policy import make_batch

TOKEN = "secret"
RECIPE = 'name = "far"\n'


@dataclass
class Served:
    url: str
    desk: TrainerDesk
    store: DiskWeightStore
    inbox: WeightInbox
    version: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, version: int, within_s: float = 60.0) -> None:
        """That many steps are acknowledged."""
        async with asyncio.timeout(within_s), self.changed:
            await self.changed.wait_for(lambda: self.version >= version)

    async def steps(self, count: int, first: int = 0) -> list[StepReport]:
        """Batch i for version i, each when the one before is acknowledged; then the run is over."""
        reports = []
        for i in range(first, first + count):
            reports.append(await self.desk.step(make_batch(id=i, version=i, siblings=8)))
            async with self.changed:
                self.version = reports[-1].version
                self.changed.notify_all()
        await self.desk.aclose()
        return reports


@asynccontextmanager
async def served(run: Path, model: Path) -> AsyncIterator[Served]:
    """`model` is version 0 of the run in `run`."""
    loop = asyncio.get_running_loop()
    store = DiskWeightStore(str(run / "weights"))
    store.adopt(str(model))
    desk = TrainerDesk(Version(0), loop.time)
    world = World(
        player=sim.SimPlayer(0, sim.KIND, {}, {}, loop.time),
        tasks=sim.SimTasks(),
        journal=sim.SimJournal(),  # type: ignore[arg-type]
        weights=store,
        trainer=desk,
        clock=loop.time,
        keep_versions=2,
        admin_s=1.0,
    )
    policy = Policy(steps=4, groups=1, siblings=2, window_groups=2, window_attempts=4, bound=2)
    driver = Driver(Core(policy), world, [], Listener())
    bound: asyncio.Future[str] = loop.create_future()
    inbox = WeightInbox(store, str(run / "weights"))
    face = Face(driver, desk, TOKEN, bound.set_result, recipe=RECIPE, inbox=inbox)
    server = asyncio.ensure_future(face.service(0)(driver.post))
    try:
        yield Served(await bound, desk, store, inbox)
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


class Gate:
    """In front of the run's inbox: the first offer waits there until it is opened."""

    def __init__(self, face: Served) -> None:
        self._offer = face.inbox.offer
        self.came = asyncio.Event()
        self.open = asyncio.Event()
        face.inbox.offer = self._pass  # type: ignore[method-assign]

    async def _pass(self, manifest: WeightsManifest) -> dict[str, int]:
        if not self.came.is_set():
            self.came.set()
            await self.open.wait()
        return await self._offer(manifest)


class Line:
    """A TCP line to a face. Each connection breaks after `lasts` bytes in either direction; `cuts` counts those."""

    def __init__(self, to: str, lasts: int) -> None:
        self._to = urlsplit(to)
        self._lasts = lasts
        self.cuts = 0
        self.bytes = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left, (theirs, to) = [self._lasts], await asyncio.open_connection(self._to.hostname, self._to.port)
        pumps = [asyncio.ensure_future(self._pump(*pair, left)) for pair in ((reader, to), (theirs, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for end in (to, writer):
            end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: list[int]) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
                self.bytes += len(data)
                left[0] -= len(data)
                if left[0] < 0:
                    self.cuts += 1
                    return
