"""A small rude world for the unchanged core and driver: ports whose answers take random time and often fail.

Nothing here models a GPU (that is `sim.fleet`); it is about order: news late and twice, engines, hosts, trainers and
the process lost at any moment. Each random choice has a stream named by what it is about: no change moves the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl import ports
from agentrl.errors import EngineLost, InfraError, ReplayDiverged, SandboxLost, TaskError
from agentrl.records import (
    AttemptId,
    Batch,
    EngineInfo,
    LoadReport,
    Place,
    RankLoad,
    Reply,
    Sampling,
    SandboxHostStatus,
    StepReport,
    Task,
    TaskId,
    Trajectory,
    TrajectoryFacts,
    Turn,
    Version,
)
from agentrl.runtime.player import Heard
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news


def stream(*name: object) -> random.Random:
    """One random stream per concern; the same name gives the same numbers in every process."""
    return random.Random("/".join(map(str, name)))


@dataclass(kw_only=True)
class Rudeness:
    """Probabilities per occasion, and mean seconds between faults. All zero: a kind world."""

    twice: float = 0.1  # an event is delivered again later
    late_s: float = 2.0  # mean delay of delayed news
    late: float = 0.1  # an event is delayed, and so overtaken
    hang: float = 0.02  # an attempt never ends by itself
    fail: float = 0.06  # an attempt fails
    load_fails: float = 0.05  # a weight load is refused
    engine_every_s: float = 150.0
    host_every_s: float = 300.0
    trainer_every_s: float = 200.0
    trainer_back_s: float = 5.0  # until it asks again; 0: it never does
    process_every_s: float = 600.0


KIND = Rudeness(
    twice=0, late_s=1, late=0, hang=0, fail=0, load_fails=0,
    engine_every_s=0, host_every_s=0, trainer_every_s=0, process_every_s=0,
)  # fmt: skip


class SimTasks:
    def __init__(self) -> None:
        self._position = 0

    def next_tasks(self, count: int) -> list[Task]:
        first, self._position = self._position, self._position + count
        return [Task(id=TaskId(f"t{n}"), kind="sim", instruction="", root="") for n in range(first, first + count)]

    def skip(self, count: int) -> None:
        self._position += count


class SimWeights:
    """ports.WeightStore that holds names only."""

    def path(self, version: Version) -> str:
        return f"v{version}"

    def latest(self) -> Version | None:
        return None

    def prune(self, keep: int, pinned: Sequence[Version] = ()) -> None:
        """Names take no room."""


class SimEngine:
    """ports.Engine of one incarnation. `kill` fails every call from then on."""

    def __init__(self, name: str, version: Version, rng: random.Random, rude: Rudeness) -> None:
        self.name = name
        self.version = version
        self.dead = asyncio.Event()
        self._rng = rng
        self._rude = rude
        self._sampled = 0
        self._running = 0

    def kill(self) -> None:
        self.dead.set()

    async def take(self, seconds: float) -> None:
        """Work for a while; EngineLost if the engine dies meanwhile."""
        self._running += 1
        try:
            async with asyncio.timeout(seconds):
                await self.dead.wait()
        except TimeoutError:
            return
        finally:
            self._running -= 1
        raise EngineLost(f"engine {self.name} is gone")

    async def sample(self, tokens: int) -> None:
        await self.take(self._rng.expovariate(1 / (0.02 * tokens)))
        self._sampled += tokens

    async def info(self, *, deadline_s: float) -> EngineInfo:
        return EngineInfo(
            kind="sim", software="0", version=self.version, ranks=2, slots=16, context_tokens=4096, kv_tokens=16_384
        )

    async def ready(self, *, deadline_s: float) -> bool:
        return not self.dead.is_set()

    async def generate(
        self, rid: str, tokens: Sequence[int], sampling: Sampling, *, rank: int, deadline_s: float
    ) -> Reply:
        raise NotImplementedError("SimPlayer talks to `sample`: no tokens in this world")

    async def abort(self, rid: str, *, deadline_s: float) -> None:
        """Cancelling the call is all there is."""

    async def loads(self, *, deadline_s: float) -> list[RankLoad]:
        await self.take(0.01)
        return [
            RankLoad(rank=r, running=self._running // 2, waiting=0, kv_used_tokens=0, kv_total_tokens=8192)
            for r in range(2)
        ]

    async def generated_tokens(self, *, deadline_s: float) -> int:
        return self._sampled

    async def stage(self, path: str, version: Version, *, deadline_s: float) -> float:
        await self.take(1.0)
        return 1.0

    async def swap(
        self, path: str, version: Version, *, deadline_s: float, regenerate: bool = False, grace_s: float = 0.0
    ) -> LoadReport:
        await self.take(self._rng.expovariate(0.5))
        if self._rng.random() < self._rude.load_fails:
            raise InfraError(f"engine {self.name} refused version {version}")
        self.version = version
        return LoadReport(version=version, stage_s=0.0, pause_s=1.0)

    async def pause(self, *, deadline_s: float) -> None:
        """Swaps pause by themselves here."""

    async def resume(self, *, deadline_s: float) -> None:
        """See pause."""

    async def aclose(self) -> None:
        self.kill()


@dataclass
class SimService:
    """A running incarnation as supervisors want it: it ends at a moment of its own, or when it is stopped."""

    ends: asyncio.Event
    lifetime_s: float  # 0: for ever

    async def wait_ended(self) -> str:
        try:
            async with asyncio.timeout(self.lifetime_s or None):
                await self.ends.wait()
        except TimeoutError:
            self.ends.set()
        return "it was killed"

    async def stop(self) -> None:
        self.ends.set()


@dataclass
class SimEngineService(SimService):
    engine: SimEngine
    info: EngineInfo


@dataclass
class SimHost:
    """ports.SandboxHost as far as supervisors ask."""

    name: str
    dead: asyncio.Event

    async def status(self, *, deadline_s: float) -> SandboxHostStatus:
        if self.dead.is_set():
            raise SandboxLost(f"sandbox host {self.name} is gone")
        return SandboxHostStatus(name=self.name, backend="sim", isolation="", live=0, lanes=())


@dataclass
class SimHostService(SimService):
    host: SimHost
    capacity: int


@dataclass
class SimPlayer:
    """runtime.player.Player without tokens. What an attempt does is a function of (seed, attempt) alone."""

    seed: int
    rude: Rudeness
    engines: dict[str, SimEngine]
    hosts: dict[str, SimHost]
    clock: Callable[[], float]
    turns_done: dict[tuple[int, int], list[Turn]] = field(default_factory=dict)  # durable turns of open siblings
    versions: dict[tuple[int, int], list[Version]] = field(default_factory=dict)

    async def play(
        self, start: orders.StartAttempt, task: Task, placement: ports.Placement, heard: Heard
    ) -> TrajectoryFacts:
        attempt, sibling = start.attempt, start.attempt[:2]
        rng = stream(self.seed, "attempt", attempt)
        if start.resume is None:
            self.turns_done[sibling], self.versions[sibling] = [], []
        turns, versions = self.turns_done[sibling], self.versions[sibling]
        if versions:
            heard.began(versions[0])
        host = self.hosts.get(start.host)
        if host is None:
            raise SandboxLost(f"sandbox host {start.host} is gone")
        open_s = rng.expovariate(2.0)
        await self._on(host, open_s)
        for index in range(len(turns), rng.randint(1, 6)):
            began = self.clock()
            version = await self._sample(placement)
            if not versions:
                heard.began(version)
            engine_s, tool_s = self.clock() - began, rng.expovariate(0.5)
            await self._on(host, tool_s)
            await self._misfortune(attempt, rng)
            versions.append(version)
            turns.append(_turn(index, placement.place, began, engine_s, tool_s))
            heard.turn(turns[-1])
        verify_s = rng.expovariate(1.0)
        await self._on(host, verify_s)
        return _facts(attempt, versions, turns, reward=rng.random(), open_s=open_s, verify_s=verify_s)

    async def _sample(self, placement: ports.Placement) -> Version:
        while True:
            place = placement.place
            engine = self.engines.get(place.engine)
            try:
                if engine is None:
                    raise EngineLost(f"engine {place.engine} is gone")
                version = engine.version
                await engine.sample(40)
                return version
            except EngineLost:
                await placement.wait_moved(place, deadline_s=120.0)

    async def _on(self, host: SimHost, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await host.dead.wait()
        except TimeoutError:
            return
        raise SandboxLost(f"sandbox host {host.name} is gone")

    async def _misfortune(self, attempt: AttemptId, rng: random.Random) -> None:
        if rng.random() < self.rude.hang:
            await asyncio.Event().wait()
        if rng.random() < self.rude.fail:
            kind = rng.choice([InfraError, InfraError, ReplayDiverged, TaskError])
            raise kind(f"{attempt}: something broke")


def _turn(index: int, place: Place, began: float, engine_s: float, tool_s: float) -> Turn:
    return Turn(
        index=index,
        start=100 * index,
        end=100 * index + 40,
        observed_end=100 * index + 100,
        place=place,
        prompt_tokens=100 * index + 60,
        cached_tokens=100 * index,
        reusable_tokens=100 * index,
        began_s=began,
        engine_s=engine_s,
        tool_s=tool_s,
    )


def _facts(attempt: AttemptId, versions: Sequence[Version], turns: Sequence[Turn], **more: Any) -> TrajectoryFacts:
    counted: dict[Version, int] = {}
    for version in versions:
        counted[version] = counted.get(version, 0) + 40
    return TrajectoryFacts(
        attempt=attempt,
        tokens=100 * len(versions),
        generated=40 * len(versions),
        versions=tuple(sorted(counted.items())),
        turns=len(versions),
        prompt_tokens=sum(100 * i + 60 for i in range(len(versions))),
        engine_s=sum(turn.engine_s for turn in turns),
        tool_s=sum(turn.tool_s for turn in turns),
        **more,
    )


class SimJournal:
    """Events are durable in groups, at each flush or half a second late; a crash loses the rest. No payloads."""

    def __init__(self) -> None:
        self.log: list[tuple[float, bytes, bytes]] = []
        self._queued: list[tuple[float, bytes, bytes]] = []

    def record_event(self, now: float, event: bytes, commands: bytes) -> None:
        self._queued.append((now, event, commands))
        if len(self._queued) >= 20:
            self._commit()

    def _commit(self) -> None:
        self.log += self._queued
        self._queued.clear()

    def crash(self) -> None:
        self._queued.clear()

    async def flush(self) -> None:
        self._commit()

    async def load(self, attempts: Sequence[AttemptId]) -> list[Trajectory]:
        return []

    def forget(self, attempt: AttemptId) -> None:
        """Nothing is kept of attempts."""

    def discard(self, attempts: Sequence[AttemptId]) -> None:
        """See forget."""


class SimTrainer:
    """One optimizer step after the other, each of random length; what it acknowledged it remembers over crashes."""

    def __init__(self, seed: int, version: Version) -> None:
        self._rng = stream(seed, "trainer", version)
        self._version = version
        self._ready = asyncio.Event()
        self._ready.set()

    async def wait_ready(self) -> Version:
        await self._ready.wait()
        self._ready.clear()
        return self._version

    async def step(self, batch: Batch) -> StepReport:
        seconds = self._rng.expovariate(1 / 8.0)
        await asyncio.sleep(seconds)
        self._version = Version(batch.version + 1)
        self._ready.set()
        return StepReport(batch=batch.id, version=self._version, seconds=seconds)

    async def aclose(self) -> None:
        """Nothing to close."""


class RudePost:
    """Between whoever posts and the inbox: some news comes late, some twice."""

    def __init__(self, post: Callable[[news.Event], None], rng: random.Random, rude: Rudeness) -> None:
        self._post = post
        self._rng = rng
        self._rude = rude

    def __call__(self, event: news.Event) -> None:
        loop = asyncio.get_running_loop()
        if self._rng.random() < self._rude.late:
            loop.call_later(self._rng.expovariate(1 / self._rude.late_s), self._post, event)
        else:
            self._post(event)
        if self._rng.random() < self._rude.twice:
            loop.call_later(self._rng.expovariate(1 / (3 * self._rude.late_s)), self._post, event)


async def at_random(mean_s: float, rng: random.Random, act: Callable[[], Awaitable[None]]) -> None:
    """Do `act` again and again, at random moments."""
    while mean_s:
        await asyncio.sleep(rng.expovariate(1 / mean_s))
        await act()
