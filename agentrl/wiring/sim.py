"""A simulated run: the same core, driver and supervisors, on virtual time, with a model in place of every adapter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.records import Version
from agentrl.runtime.effects import World
from agentrl.runtime.loop import Driver, Listener, Service
from agentrl.runtime.supervisor import EngineKeeper, HostKeeper
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim

_EPOCHS_PER_PROCESS = 1_000
_FOREVER = 1_000_000


def draw_policy(rng: random.Random) -> Policy:
    """Small numbers, so that every limit binds now and then."""
    groups, siblings, steps_a_round = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 3)
    mode = rng.choice(["async", "async", "sync", "pipelined"])
    least = groups * steps_a_round if mode != "async" else 0
    return Policy(
        steps=rng.randint(3, 8),
        groups=groups,
        siblings=siblings,
        spare=rng.choice([0, 0, 1]),
        window_groups=max(least, groups * rng.randint(1, 4) + rng.randint(0, 2)),
        window_attempts=rng.randint(1, 3 * groups * siblings),
        bound=rng.randint(0, 4) + (steps_a_round if mode != "async" else 0),
        mode=mode,
        round_groups=least,
        retries=rng.randint(1, 4),
        attempt_timeout_s=rng.choice([60.0, 200.0]),
        stall_s=2000.0,
        order=rng.choice(["rolling", "all"]),
        max_unavailable=rng.randint(1, 2),
        in_flight=rng.choice(["continue", "finish", "restart"]),
        finish_timeout_s=rng.choice([5.0, 50.0]),
        when_stale=rng.choice(["drop", "wait", "mask"]),
        admission=rng.choice(["fifo", "frontier", "shortest-group", "longest-first", "expiry"]),
        auto=mode == "async" and rng.random() < 0.3,
    )


@dataclass
class Outcome:
    finish: orders.Finish
    core: Core
    journal: list[tuple[float, bytes, bytes]]
    elapsed_s: float  # virtual
    crashes: int


@dataclass
class RudeRun:
    """One seed: a random policy in a rude world, over as many processes as it takes. `play` on a virtual loop."""

    seed: int
    rude: sim.Rudeness = field(default_factory=sim.Rudeness)
    policy: Policy | None = None
    make_core: Callable[[Policy], Core] = Core
    limit_s: float = 20_000.0

    async def play(self) -> Outcome:
        policy = self.policy or draw_policy(sim.stream(self.seed, "policy"))
        clock = asyncio.get_running_loop().time
        journal, crashes = sim.SimJournal(), 0
        rng = sim.stream(self.seed, "crash")
        turns: sim.SimPlayer = sim.SimPlayer(self.seed, self.rude, {}, {}, clock)
        while True:
            driver = self._driver(policy, journal, turns, clock)
            left = self.limit_s - clock()
            life = rng.expovariate(1 / self.rude.process_every_s) if self.rude.process_every_s else left
            try:
                async with asyncio.timeout(min(life, left)):
                    finish = await driver.run(policy.steps)
                    return Outcome(finish, driver.core, journal.log, clock(), crashes)
            except TimeoutError:
                if clock() >= self.limit_s:
                    raise AssertionError(
                        f"not finished after {self.limit_s:g} virtual seconds: {driver.core.blockers(clock())}"
                    ) from None
            journal.crash()
            crashes += 1

    def _driver(
        self, policy: Policy, journal: sim.SimJournal, player: sim.SimPlayer, clock: Callable[[], float]
    ) -> Driver:
        player.engines.clear()
        player.hosts.clear()
        core = self.make_core(policy)
        world = World(
            engines=player.engines,  # type: ignore[arg-type]
            player=player,
            tasks=sim.SimTasks(),
            journal=journal,  # type: ignore[arg-type]
            weights=sim.SimWeights(),
            trainer=sim.SimTrainer(self.seed, Version(0)),
            clock=clock,
            keep_versions=2,
            admin_s=60.0,
        )
        services: list[Service] = []
        driver = Driver(core, world, services, Listener(), strict=True)
        processes = driver.resume(journal.log)
        world.trainer = sim.SimTrainer(self.seed, core.version)
        driver.post = sim.RudePost(driver.post, sim.stream(self.seed, "news", processes), self.rude)  # type: ignore[method-assign]
        count = sim.stream(self.seed, "fleet").randint(1, 4)
        services += [self._engine(f"e{i}", core, world, player, processes) for i in range(count)]
        services += [self._host(f"h{i}", world, player, processes) for i in range(2)]
        if self.rude.trainer_every_s:
            services.append(self._trainer_faults(core, processes))
        return driver

    def _engine(self, name: str, core: Core, world: World, player: sim.SimPlayer, processes: int) -> Service:
        rng = sim.stream(self.seed, name, processes)

        async def start() -> sim.SimEngineService:
            await asyncio.sleep(rng.expovariate(0.5))
            engine = sim.SimEngine(name, core.serving, rng, self.rude)
            life = rng.expovariate(1 / self.rude.engine_every_s) if self.rude.engine_every_s else 0.0
            return sim.SimEngineService(engine.dead, life, engine, await engine.info(deadline_s=1.0))

        async def serve(post: Callable[[news.Event], None]) -> None:
            keeper = EngineKeeper(
                name,
                start,
                world.engines,
                post,
                first_epoch=processes * _EPOCHS_PER_PROCESS,
                restarts=_FOREVER,
            )
            world.keepers[name] = keeper
            await keeper.run()

        return serve

    def _host(self, name: str, world: World, player: sim.SimPlayer, processes: int) -> Service:
        rng = sim.stream(self.seed, name, processes)

        async def start() -> sim.SimHostService:
            await asyncio.sleep(rng.expovariate(0.5))
            host = sim.SimHost(name, asyncio.Event())
            life = rng.expovariate(1 / self.rude.host_every_s) if self.rude.host_every_s else 0.0
            return sim.SimHostService(host.dead, life, host, rng.randint(2, 20))

        async def serve(post: Callable[[news.Event], None]) -> None:
            keeper = HostKeeper(name, start, player.hosts, post, restarts=_FOREVER)  # type: ignore[arg-type]
            world.host_keepers[name] = keeper
            await keeper.run()

        return serve

    def _trainer_faults(self, core: Core, processes: int) -> Service:
        """The trainer goes away, comes back and asks; what it was given it gets again."""
        rng = sim.stream(self.seed, "trainer faults", processes)

        async def serve(post: Callable[[news.Event], None]) -> None:
            async def fail() -> None:
                post(news.TrainerDown(reason="killed"))
                if self.rude.trainer_back_s:
                    await asyncio.sleep(rng.expovariate(1 / self.rude.trainer_back_s))
                    post(news.TrainerReady(version=core.version))

            await sim.at_random(self.rude.trainer_every_s, rng, fail)

        return serve
