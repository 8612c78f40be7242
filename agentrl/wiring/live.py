"""Builds one live run out of concrete parts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl import ports
from agentrl.errors import UnavailableError, UserError
from agentrl.hosts.inventory import Sites, clear, connected
from agentrl.hosts.local import LocalHost
from agentrl.journal.reader import JournalReader
from agentrl.journal.store import SqliteJournal
from agentrl.publish.inbox import WeightInbox
from agentrl.publish.store import DiskWeightStore
from agentrl.publish.transfer import HostFolders
from agentrl.recipe import show
from agentrl.recipe.schema import Recipe
from agentrl.records import Version
from agentrl.rollout.template import ChatTemplate
from agentrl.runtime.agreement import Checksums
from agentrl.runtime.api import Face
from agentrl.runtime.desk import TrainerDesk
from agentrl.runtime.effects import World
from agentrl.runtime.lag import LoopLag
from agentrl.runtime.loop import Driver, Service
from agentrl.runtime.metrics import Metrics
from agentrl.runtime.player import LivePlayer
from agentrl.runtime.supervisor import EngineKeeper, HostKeeper, RunningEngine, RunningHost, keep_trainer
from agentrl.runtime.telemetry import Telemetry
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.tasks.verifier import HarborVerifier
from agentrl.train.launch import start_trainer
from agentrl.train.sender import SenderProcess, sender_of
from agentrl.wiring.borrowed import BorrowedEngine, borrow_engine, daemons_attached, hosts_attached, token_of
from agentrl.wiring.derive import identity, label_of, model_path, order_template, policy_of, task_source, token_file
from agentrl.wiring.going import Going
from agentrl.wiring.machine import check_face, check_ports
from agentrl.wiring.models import check_model
from agentrl.wiring.parts import DaemonStarter, EngineStarter, folders_at, prepare
from agentrl.wiring.top import life_of
from agentrl.wiring.trackers import Shown, trackers
from agentrl.wiring.trainer import trainer_ended
from agentrl.wiring.trial import AS_IT_IS, Trial

log = logging.getLogger("agentrl.wiring")

_UNREADY = 4  # a swap's pause, load and continue have a time-out each
_EPOCHS_PER_PROCESS = 1_000
_LINGER_S = 5.0  # an attached trainer may still be saving the last step when the run ends


@dataclass
class Run:
    """A live run, built and ready to drive. `drive` may be called once."""

    driver: Driver
    telemetry: Telemetry
    steps: int
    folder: Path

    async def drive(self) -> orders.Finish:
        return await self.driver.run(self.steps)

    def drain(self) -> None:
        """Ask for an end soon that leaves a resumable run."""
        self.driver.post(news.DrainAsked())

    def follow(self, recipe: Recipe, tell: ports.Progress, *, trainer: bool) -> None:
        """From now on `tell` hears what the run is at."""
        self.telemetry.follower = Going(recipe, self.driver.core, tell, trainer=trainer).heard

    def summary(self) -> dict[str, Any]:
        return self.telemetry.summary(self.driver.core, self.driver.world.clock())


@dataclass
class _Prepared:
    """What blocking calls make before the loop is busy."""

    model: Path
    template: ChatTemplate
    journal: SqliteJournal
    past: list[tuple[float, bytes, bytes]]
    token_file: Path
    store: DiskWeightStore
    tasks: ports.TaskSource
    engine_token: str  # of engines that are not ours
    label: str
    borrowed: dict[str, str]  # URL to host, of engines that are not ours


def _prepare(recipe: Recipe, folder: Path, progress: ports.Progress | None = None) -> _Prepared:
    """Everything that can be wrong with the user's input is found here, before anything starts."""
    model = model_path(recipe)
    check_model(model)
    template = ChatTemplate.from_folder(str(model))
    engine_token = token_of(recipe.engines)
    tasks = task_source(recipe, folder)
    if not recipe.hosts:
        check_ports(recipe.engines)
    check_face(recipe.telemetry.port)
    _make(folder / "logs")
    journal = SqliteJournal.open(folder / "run.sqlite", recipe=identity(recipe))
    store = DiskWeightStore(str(folder / "weights"))
    if store.latest() is None:
        store.adopt(str(model), progress)
    (folder / "recipe.toml").write_text(show.dump(recipe))
    return _Prepared(
        model=model,
        template=template,
        journal=journal,
        past=list(journal.events()),
        token_file=token_file(folder),
        store=store,
        tasks=tasks,
        engine_token=engine_token,
        label=label_of(recipe.name, folder),
        borrowed=hosts_attached(recipe),
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(f"{folder}: cannot be made: {exc.strerror}", hint="give a --run-dir that can") from exc


@contextlib.asynccontextmanager
async def build_live(
    recipe: Recipe,
    folder: Path,
    *,
    shown: Callable[[dict[str, Any]], None] = lambda step: None,
    progress: ports.Progress | None = None,
    trial: Trial = AS_IT_IS,
) -> AsyncIterator[Run]:
    """Everything of one run, resumed from `folder` where it holds one. Closes all of it on exit."""
    ready = await asyncio.to_thread(_prepare, recipe, folder, progress)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(ready.journal.aclose)
        sites = await stack.enter_async_context(connected(recipe, folder, ready.label))
        stack.push_async_callback(clear, sites, folder / "logs")
        token, weights = ready.token_file.read_text().strip(), str((folder / "weights").absolute())
        attached = {"engines": recipe.engines.attach, "sandbox": recipe.sandbox.attach}
        starting = [role for role, what in attached.items() if not what]
        folders = await prepare(recipe, sites, token=token, store=weights, roles=starting)
        folders |= await folders_at(recipe, sites, set(ready.borrowed.values()), weights)
        sender = await stack.enter_async_context(sender_of(recipe, folder))
        heard = Shown(shown, await asyncio.to_thread(trackers, recipe, folder))
        core = Core(policy_of(recipe))
        clock = _run_clock(ready.past[-1][0] if ready.past else 0.0)
        desk = TrainerDesk(Version(0), clock)
        hosts: dict[str, ports.SandboxHost] = {}
        trainer = trial.trainer(desk, folder, ready.store, recipe.publish.keep_versions)
        world = _world(recipe, ready, hosts, trainer, clock, trial)
        head = {"recipe": recipe.name, "seed": recipe.seed, "mode": "live"}
        telemetry = Telemetry(
            folder, head, clock, order=recipe.publish.order, in_flight=recipe.publish.in_flight, shown=heard
        )
        services: list[Service] = []
        driver = Driver(core, world, services, telemetry)
        processes = await asyncio.to_thread(driver.resume, ready.past)
        desk.expect(core.version)
        if not trial.trains:
            await desk.aclose()  # a trainer that attaches is told that there is nothing to train
        parts = _Parts(recipe, folder, ready, core, world, hosts, processes, sites, folders, sender, trial.pooled)
        services.extend(parts.engines())
        services.extend(parts.sandboxes())
        embedded = recipe.train.embedded and trial.trains
        services.extend(parts.face_and_trainer(driver, desk, telemetry, trainer=embedded))
        try:
            yield Run(driver, telemetry, recipe.steps, folder)
        finally:
            telemetry.close()
            await asyncio.to_thread(heard.close)
            (folder / "url").unlink(missing_ok=True)


def _world(
    recipe: Recipe,
    ready: _Prepared,
    hosts: dict[str, ports.SandboxHost],
    trainer: ports.Trainer,
    clock: Callable[[], float],
    trial: Trial,
) -> World:
    engines: dict[str, ports.Engine] = {}
    player = LivePlayer(
        engines=engines,
        hosts=hosts,
        verifier=HarborVerifier(),
        journal=ready.journal,
        template=ready.template,
        template_order=order_template(recipe, ready.label),
        clock=clock,
        new_rid=lambda: uuid.uuid4().hex,
    )
    return World(
        engines=engines,
        player=trial.player(player, recipe),
        tasks=ready.tasks,
        journal=ready.journal,
        weights=ready.store,
        trainer=trainer,
        clock=clock,
        keep_versions=recipe.publish.keep_versions,
        admin_s=recipe.engines.admin_timeout_s,
        regenerate=recipe.publish.in_flight == "regenerate",
        grace_s=recipe.publish.grace_s,
        checksums=None if recipe.engines.attach else Checksums(),
    )


@dataclass
class _LiveTrainer:
    process: ports.Process
    log: Path

    async def wait_ended(self) -> str:
        """Raises where starting it again would not help: it said itself that its input or its disk is at fault."""
        code = await self.process.wait()
        if code in (UserError.exit_code, UnavailableError.exit_code):
            raise trainer_ended(code, self.log)
        return f"its process ended with code {code}"

    async def stop(self) -> None:
        await self.process.stop()


@dataclass
class _Parts:
    """The services of a live run, each a supervisor around something that is started."""

    recipe: Recipe
    folder: Path
    ready: _Prepared
    core: Core
    world: World
    hosts: dict[str, ports.SandboxHost]
    processes: int
    sites: Sites
    folders: dict[str, HostFolders]
    sender: SenderProcess | None
    pooled: bool

    def engines(self) -> list[Service]:
        section = self.recipe.engines
        if section.attach:
            return [self._engine(f"e{i}", self._borrowed(f"e{i}", url)) for i, url in enumerate(section.attach)]
        return [self._own(f"e{index}", host) for index, host in enumerate(self.recipe.engine_hosts)]

    def _borrowed(self, name: str, url: str) -> Callable[[], Awaitable[BorrowedEngine]]:
        section, tries = self.recipe.engines, itertools.count()

        async def start() -> BorrowedEngine:
            version = self.core.serving
            return await borrow_engine(
                self.recipe,
                name,
                url,
                self.ready.engine_token,
                path=self.ready.store.path(version),
                version=version,
                patience_s=section.start_timeout_s if next(tries) else 0.0,
                folders=self.folders.get(self.ready.borrowed.get(url, "")),
            )

        return start

    def _own(self, name: str, host: str) -> Service:
        starter = EngineStarter(
            self.recipe,
            name,
            self.sites[host],
            self.ready.label,
            self.ready.token_file.read_text().strip(),
            self.folders.get(host),
            version=lambda: self.core.serving,
            path=self.ready.store.path,
            sender=self.sender,
        )
        return self._engine(name, starter.start, self.sites[host].link)

    def _engine(
        self, name: str, start: Callable[[], Awaitable[RunningEngine]], link: ports.Host | None = None
    ) -> Service:
        async def serve(post: Callable[[news.Event], None]) -> None:
            keeper = EngineKeeper(
                name,
                start,
                self.world.engines,
                post,
                first_epoch=self.processes * _EPOCHS_PER_PROCESS,
                restarts=self.recipe.engines.restarts,
                link=link,
                stuck_s=self.recipe.engines.stuck_s,
                unready_s=_UNREADY * self.recipe.engines.admin_timeout_s,
            )
            self.world.keepers[name] = keeper
            await keeper.run()

        return serve

    def sandboxes(self) -> list[Service]:
        sandbox = self.recipe.sandbox
        if sandbox.attach:
            return [self._daemon(name, start) for name, start in daemons_attached(sandbox).items()]
        found = []
        for name in self.recipe.sandbox_hosts:
            starter = DaemonStarter(self.recipe, self.sites[name], self.ready.label, pooled=self.pooled)
            found.append(self._daemon(name or "local", starter.start, starter.site.link, starter.collect))
        return found

    def _daemon(
        self,
        name: str,
        start: Callable[[], Awaitable[RunningHost]],
        link: ports.Host | None = None,
        collect: Callable[[], Awaitable[None]] | None = None,
    ) -> Service:
        async def serve(post: Callable[[news.Event], None]) -> None:
            keeper = HostKeeper(name, start, self.hosts, post, restarts=self.recipe.sandbox.restarts, link=link)
            self.world.host_keepers[name] = keeper
            try:
                await keeper.run()
            finally:
                if collect is not None:
                    await collect()

        return serve

    def face_and_trainer(
        self, driver: Driver, desk: TrainerDesk, telemetry: Telemetry, *, trainer: bool
    ) -> list[Service]:
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def bound(address: str) -> None:
            (self.folder / "url").write_text(address + "\n")
            url.set_result(address)

        face = Face(
            driver,
            desk,
            self.ready.token_file.read_text().strip(),
            bound,
            recipe=show.dump(self.recipe),
            inbox=WeightInbox(self.ready.store, str(self.folder / "weights")),
        )
        telemetry.stream = face.heard
        telemetry.metrics = face.metrics = Metrics(
            face.picture, face.recent.rates, lambda: telemetry.steps, telemetry.tokens
        )
        face.lives = partial(life_of, JournalReader(self.folder / "run.sqlite"))
        driver.world.lag = LoopLag(telemetry.lagged)

        async def train(post: Callable[[news.Event], None]) -> None:
            address = await url

            async def start() -> _LiveTrainer:
                process = await start_trainer(
                    LocalHost(),
                    self.recipe,
                    run_dir=str(self.folder),
                    url=address,
                    token_file=str(self.ready.token_file),
                    model_path=str(self.ready.model),
                )
                return _LiveTrainer(process, self.folder / "logs" / "trainer.log")

            await keep_trainer(start, restarts=self.recipe.train.restarts)

        port, watched = self.recipe.telemetry.port, driver.world.lag.watch
        if trainer:
            return [watched, face.service(port), train]
        return [watched, face.service(port, linger_s=_LINGER_S)]


def _run_clock(offset: float) -> Callable[[], float]:
    """Seconds of the run: goes on where the last process stopped."""
    began = time.monotonic()
    return lambda: offset + time.monotonic() - began
