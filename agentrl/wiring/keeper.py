"""The process that holds a recipe's services: `python -m agentrl.wiring.keeper KIND RECIPE READY_FD LOCK_FD`.

Started by `services.py`, detached, with the lock already held. It starts the parts, says once on READY_FD that they
serve or why not, and ends at SIGTERM with all of them, or when the last of them is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import AgentRLError
from agentrl.hosts.inventory import Sites, clear, connected
from agentrl.ports import Progress
from agentrl.publish.store import DiskWeightStore
from agentrl.recipe.load import load
from agentrl.recipe.schema import Recipe
from agentrl.records import Version
from agentrl.sandbox.launch import Paths
from agentrl.wiring.derive import label_of, model_path
from agentrl.wiring.parts import DaemonStarter, EngineStarter, prepare
from agentrl.wiring.services import Part, Serving, Told

log = logging.getLogger("agentrl.keeper")

ROLES = {"serve": "engines", "sandbox": "sandbox"}
_STATE = {"serve": "weights", "sandbox": "sandbox"}  # what a kind keeps below its folder while it runs


@dataclass
class Held:
    """A part that serves. `ended` returns when its process is gone; `stop` ends it."""

    part: Part
    ended: Callable[[], Awaitable[object]]
    stop: Callable[[], Awaitable[None]]


class Asker:
    """Whoever ran `up` and waits at the other end of a pipe: what goes on, then once how it ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def tell(self, told: Told) -> None:
        """They may be gone by now: that is their affair."""
        if self._fd < 0:
            return
        self._write(told)
        os.close(self._fd)
        self._fd = -1

    def progress(self, who: str, what: str, share: float | None = None) -> None:
        """A `ports.Progress`."""
        log.info("%s: %s%s", who, what, f", {share:.0%}" if share is not None else "")
        if self._fd >= 0:
            self._write(Told(who=who, what=what, share=share))

    def _write(self, told: Told) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, msgspec.json.encode(told) + b"\n")


async def keep(kind: str, recipe: Recipe, folder: Path, asker: Asker) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    held: list[Held] = []
    label = label_of(f"{recipe.name}-{kind}", folder)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(_forget, kind, folder)
        sites = await stack.enter_async_context(connected(recipe, folder, label, ROLES[kind]))
        stack.push_async_callback(clear, sites, folder / "logs")
        stack.push_async_callback(_stop, held)
        await _unless_told(stop, _start(kind, recipe, folder, sites, label, held, asker.progress))
        if stop.is_set():
            return 130
        serving = _serving(kind, recipe, folder, held)
        _write(folder / f"{kind}.json", serving)
        asker.tell(Told(serving=serving))
        await _unless_told(stop, _watch(held))
        return 0 if stop.is_set() else 1


async def _stop(held: list[Held]) -> None:
    await asyncio.gather(*(part.stop() for part in held))


async def _forget(kind: str, folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder / _STATE[kind], ignore_errors=True)


async def _unless_told(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Until `work` is done (raising what it raised) or somebody asked for the end."""
    task = asyncio.create_task(work)
    both: set[asyncio.Task[Any]] = {task, asyncio.create_task(stop.wait())}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        for each in both:
            each.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _start(
    kind: str, recipe: Recipe, folder: Path, sites: Sites, label: str, held: list[Held], progress: Progress
) -> None:
    """All parts side by side. Those that came up are in `held` whatever happens."""
    token = (folder / "token").read_text().strip()
    store = await asyncio.to_thread(_adopt, recipe, folder) if kind == "serve" else None
    weights = str(folder / _STATE["serve"])
    folders = await prepare(recipe, sites, token=token, store=weights, roles=(ROLES[kind],), progress=progress)
    if store is None:
        async with asyncio.TaskGroup() as group:
            for name in recipe.sandbox_hosts:
                starter = DaemonStarter(recipe, sites[name], label)
                group.create_task(_daemon(starter, held), name=f"sandbox daemon {name}")
        return
    async with asyncio.TaskGroup() as group:
        for index, name in enumerate(recipe.engine_hosts):
            engine = EngineStarter(
                recipe,
                f"e{index}",
                sites[name],
                label,
                token,
                folders.get(name),
                version=lambda: Version(0),
                path=store.path,
                progress=progress,
            )
            group.create_task(_engine(engine, held), name=f"e{index}")


def _adopt(recipe: Recipe, folder: Path) -> DiskWeightStore:
    """A store of their own, so that the model's folder may change or go while the engines run."""
    weights = folder / _STATE["serve"]
    shutil.rmtree(weights, ignore_errors=True)
    store = DiskWeightStore(str(weights))
    store.adopt(str(model_path(recipe)))
    return store


async def _engine(starter: EngineStarter, held: list[Held]) -> None:
    own, site = await starter.start(), starter.site
    part = Part(
        name=starter.name,
        host=site.name,
        pid=own.process.pid,
        log=f"{site.run_dir}/logs/{starter.name}.log",
        url=own.engine.url,
        served_name=own.served_name,
    )
    held.append(Held(part, own.process.wait, own.stop))


async def _daemon(starter: DaemonStarter, held: list[Held]) -> None:
    own, site = await starter.start(), starter.site
    paths = Paths.below(site.run_dir)
    url = await site.host.reach(f"unix:{paths.socket}")
    part = Part(name=site.name or "local", host=site.name, pid=own.running.process.pid, log=paths.log, url=url)
    held.append(Held(part, own.wait_ended, own.stop))


async def _watch(held: list[Held]) -> None:
    """Until nothing is left to hold."""

    async def watch(part: Held) -> None:
        await part.ended()
        log.error("%s (process %d) ended by itself; see %s", part.part.name, part.part.pid, part.part.log)

    async with asyncio.TaskGroup() as group:
        for part in held:
            group.create_task(watch(part), name=part.part.name)


def _serving(kind: str, recipe: Recipe, folder: Path, held: list[Held]) -> Serving:
    own = kind == "sandbox" and not recipe.hosts  # the daemon's, where it is on this machine
    token = Path(Paths.below(str(folder)).token) if own else folder / "token"
    return Serving(
        kind=kind,
        recipe=recipe.name,
        pid=os.getpid(),
        started=time.time(),
        folder=str(folder),
        token_file=str(token),
        parts=tuple(sorted((part.part for part in held), key=lambda part: part.name)),
    )


def _write(path: Path, serving: Serving) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(serving)))
    partial.replace(path)


def _first(exc: BaseException) -> BaseException:
    return _first(exc.exceptions[0]) if isinstance(exc, BaseExceptionGroup) else exc


def main(argv: list[str]) -> int:
    kind, recipe_file, ready_fd, lock_fd = argv[0], Path(argv[1]), int(argv[2]), int(argv[3])
    for fd in (ready_fd, lock_fd):
        os.set_inheritable(fd, False)  # an engine that outlived us would hold the lock
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, b"%d\n" % os.getpid(), 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    asker = Asker(ready_fd)
    try:
        return asyncio.run(keep(kind, load(recipe_file), recipe_file.parent, asker))
    except (AgentRLError, BaseExceptionGroup) as group:
        exc = _first(group)
        if not isinstance(exc, AgentRLError):
            raise
        log.error("%s", exc)
        asker.tell(Told(message=str(exc), hint=exc.hint, exit_code=exc.exit_code))
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
