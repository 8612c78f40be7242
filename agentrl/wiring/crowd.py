"""A crowd of conversations that only wait, on the real clock, under the real core, driver and HTTP face: for what
watching a large run costs the run."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl import ports
from agentrl.recipe import show
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sim import SimTrainer
from agentrl.records import AttemptId, Lane, Place, Task, TrajectoryFacts, Turn, Version
from agentrl.runtime.api import Face
from agentrl.runtime.desk import TrainerDesk
from agentrl.runtime.effects import World
from agentrl.runtime.lag import LoopLag
from agentrl.runtime.loop import Driver, Listener, Service
from agentrl.runtime.metrics import Metrics
from agentrl.runtime.player import Heard
from agentrl.runtime.trace import Trace
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim
from agentrl.wiring.fleet import FleetTrainer

TURNS = 10  # of one conversation
_GROUPS, _SIBLINGS = 8, 16
_BEGUN_S = 2.0
_ENGINES, _RANKS = 32, 8


@dataclass
class Crowd:
    """`drive` until cancelled. face: None where nothing is watched. lags: how late the loop was at each look."""

    driver: Driver
    face: Face | None
    bound: asyncio.Future[str]  # the face's address
    turns: int = 0
    lags: list[float] = field(default_factory=list)

    async def drive(self) -> None:
        await self.driver.run(1 << 30)


@contextlib.asynccontextmanager
async def crowd(folder: Path, *, attempts: int, turns_per_s: float, watched: bool) -> AsyncIterator[Crowd]:
    """On a running loop. watched: with trace, metrics and the HTTP face, in `folder` as a live run's."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    policy = Policy(
        steps=1 << 30,
        groups=_GROUPS,
        siblings=_SIBLINGS,
        window_groups=attempts // _SIBLINGS + 2 * _GROUPS,
        window_attempts=attempts,
        bound=1 << 10,
        attempt_timeout_s=3_600.0,
    )
    listener = _Watched(lambda: loop.time() - began)
    world = World(
        player=_Player(random.Random(0), attempts / turns_per_s, listener.clock),
        tasks=sim.SimTasks(),
        journal=sim.SimJournal(),  # type: ignore[arg-type]
        weights=sim.SimWeights(),
        trainer=FleetTrainer(SimTrainer(step_s=0.0), None, fixed=True),
        clock=listener.clock,
        keep_versions=2,
        admin_s=60.0,
    )
    services: list[Service] = []
    driver = Driver(Core(policy), world, services, listener)
    made = Crowd(driver, None, loop.create_future())
    world.lag = LoopLag(made.lags.append)
    listener.crowd = made
    services += [world.lag.watch, _up(attempts)]
    if watched:
        services.append(_watch(made, listener, folder))
    try:
        yield made
    finally:
        if listener.trace is not None:
            listener.trace.close()


def _up(attempts: int) -> Service:
    """All engines and hosts of it come up, and stay; no weights are loaded."""

    async def serve(post: Callable[[news.Event], None]) -> None:
        for index in range(_ENGINES):
            slots = max(1, attempts // (_ENGINES * _RANKS))
            up = news.EngineUp(
                engine=f"e{index:02}", epoch=0, version=Version(0), ranks=_RANKS, slots=slots, kv_tokens=1 << 24
            )
            post(up)
        post(news.SandboxHostUp(host="h0", capacity=attempts))
        await asyncio.Event().wait()

    return serve


def _watch(crowd: Crowd, listener: _Watched, folder: Path) -> Service:
    token = secrets.token_hex(16)
    (folder / "recipe.toml").write_text(show.dump(Recipe(name="crowd")))
    (folder / "token").write_text(token)
    desk = TrainerDesk(Version(0), listener.clock)
    crowd.face = Face(crowd.driver, desk, token, crowd.bound.set_result)
    crowd.face.metrics = listener.metrics = Metrics(crowd.face.picture, crowd.face.recent.rates, list, dict)
    listener.trace = Trace(folder / "trace.json")
    return crowd.face.service(0)


class _Watched(Listener):
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.crowd: Crowd | None = None
        self.trace: Trace | None = None
        self.metrics: Metrics | None = None

    def turn(self, attempt: AttemptId, turn: Turn) -> None:
        assert self.crowd is not None
        self.crowd.turns += 1
        if self.trace is not None and self.metrics is not None:
            self.trace.turn(attempt, turn, self.clock())
            self.metrics.turn(turn)

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        assert self.crowd is not None
        if self.crowd.face is not None and self.trace is not None:
            self.crowd.face.heard(now, event, commands)
            self.trace.heard(now, event, commands, core)


@dataclass
class _Player:
    """runtime.player.Player: each turn waits, half in an engine and half in a sandbox."""

    rng: random.Random
    turn_s: float
    clock: Callable[[], float]

    async def play(
        self, start: orders.StartAttempt, task: Task, placement: ports.Placement, heard: Heard
    ) -> TrajectoryFacts:
        heard.began(Version(0))
        first = self.rng.randrange(TURNS) if self.clock() < _BEGUN_S else 0  # as if the crowd had been there for long
        for index in range(first, TURNS):
            began, half = self.clock(), self.rng.expovariate(2 / self.turn_s)
            await asyncio.sleep(2 * half)
            heard.turn(_turn(index, placement.place, began, half))
        return TrajectoryFacts(
            attempt=start.attempt,
            reward=self.rng.random(),
            tokens=1_000 * TURNS,
            generated=400 * TURNS,
            versions=((Version(0), 400 * TURNS),),
            turns=TURNS,
            engine_s=self.turn_s * TURNS / 2,
            tool_s=self.turn_s * TURNS / 2,
            open_s=0.1,
            verify_s=0.1,
        )


def _turn(index: int, place: Place, began: float, half: float) -> Turn:
    return Turn(
        index=index,
        start=1_000 * index,
        end=1_000 * index + 400,
        observed_end=1_000 * (index + 1),
        place=place,
        prompt_tokens=1_000 * index,
        cached_tokens=900 * index,
        reusable_tokens=900 * index,
        command="pytest -q",
        exit_code=0,
        lane=Lane.COMMAND,
        began_s=began,
        engine_s=half,
        queue_s=0.1 * half,
        prefill_s=0.1 * half,
        decode_s=0.8 * half,
        tool_wait_s=0.1 * half,
        tool_s=0.9 * half,
    )
