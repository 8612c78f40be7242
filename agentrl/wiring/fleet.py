"""A simulated fleet under the unchanged core and driver: `sim.fleet` models in place of engines, hosts and trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl import ports
from agentrl.errors import InfraError
from agentrl.recipe.sim import SimRecipe, SimTrainer
from agentrl.records import (
    Batch,
    EngineInfo,
    LoadReport,
    RankLoad,
    SandboxHostStatus,
    StepReport,
    Version,
)
from agentrl.runtime.effects import World
from agentrl.runtime.loop import Driver, Listener, Service
from agentrl.runtime.placement import Scatter
from agentrl.runtime.player import Scattered
from agentrl.runtime.supervisor import EngineKeeper, HostKeeper, Link
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim
from agentrl.sim.clock import run
from agentrl.sim.fleet.build import costs_of, host_plan_of, plans_of, policy_of
from agentrl.sim.fleet.controller import Controller
from agentrl.sim.fleet.engine import EngineModel
from agentrl.sim.fleet.host import HostModel
from agentrl.sim.fleet.ops import Plans
from agentrl.sim.fleet.player import FleetPlayer, PlayerRules


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an arm changes beside the recipe.

    fixed_weights: no trainer time and no publication, batches are only collected. per_request: each call goes to a
    random rank, as behind a balancer that knows nothing of histories. drain: a swap waits until what runs has ended.
    sentinel: what is published is a token in place of weights, so nothing is staged.
    """

    fixed_weights: bool = False
    per_request: bool = False
    drain: bool = False
    sentinel: bool = False


@dataclass
class FleetEngine:
    """ports.Engine around a model, as far as supervisors and effects need one. in_flight: continue | drain |
    regenerate; what a swap does to generations that run."""

    model: EngineModel
    in_flight: str = "continue"
    sentinel: bool = False

    @property
    def name(self) -> str:
        return self.model.name

    async def info(self, *, deadline_s: float) -> EngineInfo:
        costs = self.model.costs
        return EngineInfo(
            kind="sim",
            software="0",
            version=self.model.version,
            ranks=costs.ranks,
            slots=costs.slots * costs.ranks,
            context_tokens=1 << 30,
            kv_tokens=int(costs.pool_tokens) * costs.ranks,
        )

    async def loads(self, *, deadline_s: float) -> list[RankLoad]:
        return self.model.loads()

    async def generated_tokens(self, *, deadline_s: float) -> int:
        return self.model.generated_tokens

    async def stage(self, path: str, version: Version, *, deadline_s: float) -> float:
        if self.sentinel:
            self.model.staged = version
            return 0.0
        return await self.model.stage(version)

    async def swap(
        self, path: str, version: Version, *, deadline_s: float, regenerate: bool = False, grace_s: float = 0.0
    ) -> LoadReport:
        began = asyncio.get_running_loop().time()
        lost = 0
        if self.in_flight == "drain":
            await self.model.drain()
        elif regenerate:
            try:
                async with asyncio.timeout(grace_s):
                    await self.model.drain()
            except TimeoutError:
                lost = self.model.abort_all()
        try:
            await self.model.swap(version)
        finally:
            self.model.reopen()
        pause_s = asyncio.get_running_loop().time() - began
        return LoadReport(version=version, stage_s=0.0, pause_s=pause_s, lost_tokens=lost)

    async def aclose(self) -> None:
        """The model goes with the loop."""


class FleetTrainer:
    """ports.Trainer: a step takes step_s, and token_s for each trained token, on `host` where it has threads there.
    Fixed weights: none at all, and the version stays."""

    def __init__(self, plan: SimTrainer, host: HostModel | None, *, fixed: bool) -> None:
        self._plan = plan
        self._host = host
        self._fixed = fixed
        self._version = Version(0)
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._ready.set()

    async def wait_ready(self) -> Version:
        await self._ready.wait()
        self._ready.clear()
        return self._version

    async def step(self, batch: Batch) -> StepReport:
        began = self._loop.time()
        if not self._fixed:
            await self._work(sum(tokens for proof in batch.proofs for _, tokens in proof.tokens))
            self._version = Version(batch.version + 1)
        self._ready.set()
        return StepReport(batch=batch.id, version=self._version, seconds=self._loop.time() - began)

    async def _work(self, tokens: int) -> None:
        seconds, threads = self._plan.step_s + tokens * self._plan.token_s, self._plan.threads
        if threads and self._host is not None:
            await self._host.compute(seconds * threads, width=threads)
        else:
            await asyncio.sleep(seconds)

    async def aclose(self) -> None:
        """Nothing to close."""


@dataclass
class Fleet:
    """One simulated run, and what a bench may look at meanwhile and afterwards."""

    driver: Driver
    core: Core
    engines: dict[str, EngineModel]
    hosts: dict[str, HostModel]
    policy: Policy

    async def drive(self) -> orders.Finish:
        return await self.driver.run(self.policy.steps)


def build_fleet(
    recipe: SimRecipe,
    seed: int,
    options: Options,
    listener: Listener,
    *,
    make_core: Callable[[Policy], Core] = Core,
    plans: Plans | None = None,
    links: Mapping[str, Link] | None = None,
) -> Fleet:
    """On a running virtual loop. Same seed, same run. plans: in place of the recipe's own. links: to hosts, by name."""
    clock = asyncio.get_running_loop().time
    policy = policy_of(recipe)
    core = make_core(policy)
    each = recipe.fleet.engines_per_host
    models = {f"e{i}": EngineModel(f"e{i}", costs_of(recipe)) for i in range(each * recipe.fleet.hosts)}
    hosts = {f"h{i}": HostModel(f"h{i}", host_plan_of(recipe)) for i in range(recipe.fleet.hosts)}
    rules = PlayerRules(keep_partial=recipe.publish.in_flight != "regenerate")
    player = FleetPlayer(
        engines=models,
        hosts=hosts,
        plans=plans or plans_of(recipe, seed),
        clock=clock,
        rules=rules,
        controller=Controller(hosts["h0"], recipe.fleet.controller),
    )
    scattered = Scattered(player, Scatter(models, costs_of(recipe).ranks, sim.stream(seed, "scatter")))
    world = World(
        player=scattered if options.per_request else player,
        tasks=sim.SimTasks(),
        journal=sim.SimJournal(),  # type: ignore[arg-type]
        weights=sim.SimWeights(),
        trainer=FleetTrainer(recipe.trainer, hosts["h0"], fixed=options.fixed_weights),
        clock=clock,
        keep_versions=2,
        admin_s=3_600.0,
        regenerate=recipe.publish.in_flight == "regenerate",
        grace_s=recipe.publish.grace_s,
    )
    threads = recipe.fleet.measured.threads if recipe.fleet.measured is not None else 0
    services: list[Service] = []
    driver = Driver(core, world, services, listener)
    driver.resume([])
    for index, name in enumerate(models):
        services.append(_engine(name, models[name], hosts[f"h{index // each}"], world, options, threads))
    services += [_host(name, recipe, world, hosts, (links or {}).get(name)) for name in hosts]
    return Fleet(driver, core, models, hosts, policy)


def _engine(name: str, model: EngineModel, host: HostModel, world: World, options: Options, threads: int) -> Service:
    async def start() -> sim.SimEngineService:
        engine = FleetEngine(model, "drain" if options.drain else "continue", options.sentinel)
        info = await engine.info(deadline_s=1.0)
        return sim.SimEngineService(asyncio.Event(), 0.0, engine, info)  # type: ignore[arg-type]

    async def serve(post: Callable[[news.Event], None]) -> None:
        host.serve(model)
        if threads:
            model.stirred = lambda steps: host.occupy(threads if steps else -threads)
        keeper = EngineKeeper(name, start, world.engines, post, first_epoch=0, restarts=0)
        world.keepers[name] = keeper
        await keeper.run()

    return serve


@dataclass
class _Asked:
    """A host that supervisors may ask."""

    model: HostModel

    async def status(self, *, deadline_s: float) -> SandboxHostStatus:
        if self.model.lost:
            raise InfraError(f"{self.model.name} is gone")
        return self.model.status()


def _host(name: str, recipe: SimRecipe, world: World, hosts: dict[str, HostModel], link: Link | None) -> Service:
    registry: dict[str, ports.SandboxHost] = {}

    async def start() -> sim.SimHostService:
        return sim.SimHostService(asyncio.Event(), 0.0, _Asked(hosts[name]), recipe.fleet.sandboxes_per_host)  # type: ignore[arg-type]

    async def serve(post: Callable[[news.Event], None]) -> None:
        keeper = HostKeeper(name, start, registry, post, restarts=0, link=link)  # type: ignore[arg-type]
        world.host_keepers[name] = keeper
        await keeper.run()

    return serve


def simulate(
    recipe: SimRecipe,
    seed: int,
    options: Options,
    listener: Listener,
    *,
    watch: Callable[[Fleet], None] = lambda fleet: None,
    make_core: Callable[[Policy], Core] = Core,
    plans: Plans | None = None,
) -> orders.Finish:
    """Run it to its end in virtual time. watch: called with the fleet before it starts."""

    async def main() -> orders.Finish:
        fleet = build_fleet(recipe, seed, options, listener, make_core=make_core, plans=plans)
        watch(fleet)
        return await fleet.drive()

    return run(main())
