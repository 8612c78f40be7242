"""Boxes in Docker containers, by image. See docs/decisions/0016-docker-sandboxes.md.

A container holds our init; a box is a copy-on-write view of the image within it. Containers are started by the engine
(0.3 s) and then serve one box after another, each on a fresh file system (milliseconds). Commands go to the init over a
Unix socket, never through the engine. An image without Python gets slower boxes, by `docker exec` (`bare.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, DeadlineError, InfraError, SandboxLost, TaskError, UnavailableError
from agentrl.recipe import schema
from agentrl.records import ExecResult, Limits
from agentrl.sandbox.backends import container as containers
from agentrl.sandbox.backends.bare import BareBox
from agentrl.sandbox.backends.base import Box, BoxSpec
from agentrl.sandbox.backends.channel import ChannelBox
from agentrl.sandbox.backends.container import OWNER, RUN, Container, Kind, NoInterpreter
from agentrl.sandbox.backends.dockerd import Dockerd
from agentrl.sandbox.backends.inside import cgroups
from agentrl.sandbox.backends.warm import Pace, Shelf

_log = logging.getLogger(__name__)


class DockerBackend:
    """image: of boxes that name none. state_dir: for the folders that containers share with us while they start."""

    name = "docker"

    def __init__(self, settings: schema.Docker, *, image: str, state_dir: str) -> None:
        self._settings, self._image = settings, image
        self._dockerd = Dockerd(settings.url, timeout_s=settings.call_timeout_s)
        self._folder = Path(state_dir).resolve() / "docker"
        self._owner = f"{os.getpid()}-{cgroups.start_time(os.getpid())}"
        self._cpus = tuple(sorted(os.sched_getaffinity(0)))
        self._made: set[Container] = set()
        self._shelf: Shelf[Kind, Container] = Shelf(settings.warm)
        self._pace = Pace(settings.starts, settings.starts_per_s)
        self._numbers = itertools.count()
        self._engine: dict[str, Any] = {}
        self._images: dict[str, str] = {}  # name to id
        self._bare: dict[str, float] = {}  # ids of images without an interpreter: seconds of one command
        self.in_advance: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def isolation(self) -> str:
        engine = f"engine {self._engine['ServerVersion']}" if self._engine else "not asked yet"
        bare = ""
        if self._bare:
            slowest = 1e3 * max(self._bare.values())
            bare = f"; {len(self._bare)} images without Python: by docker exec, {slowest:.0f} ms a command"
        return (
            f"Docker containers ({engine}), commands as root with few capabilities, no new privileges and Docker's "
            "seccomp filter; memory, processes and CPUs by the container's cgroups; files on a sized tmpfs over the "
            f"read-only image; the container's init may mount; the kernel is shared with the host{bare}"
        )

    async def probe(self) -> None:
        """Asks the engine, and tries the recipe's image: without one, each task's own is tried when it comes."""
        await self._ask()
        if not self._image:
            return
        await self._dockerd.image_id(self._image)
        box = await self.start(BoxSpec(id=f"probe-{os.getpid()}", label="probe", limits=Limits()))
        try:
            result = await box.exec("exit 0", timeout_s=20, cpus=())
        finally:
            await box.kill()
        if result.exit_code != 0:
            raise UnavailableError(
                f"sandbox backend docker: image {self._image}: `exit 0` ended with {result.exit_code}: {result.output}",
                hint="Does its shell run in a container of this engine?",
            )

    async def _ask(self) -> None:
        if not self._engine:
            self._engine = await self._dockerd.call("ask the engine", lambda client: client.info())
            if self._engine.get("CgroupDriver") == "none":
                raise UnavailableError(
                    f"sandbox backend docker: the engine at {self._dockerd.url} has no control groups",
                    hint="Use an engine that is not rootless, or one with delegated control groups.",
                )

    async def start(self, spec: BoxSpec) -> Box:
        await self._ask()
        kind = await self._kind(spec)
        if kind.image not in self._bare:
            try:
                return DockerBox(spec, self, await self._ready(kind, spec))
            except NoInterpreter:
                pass
        async with self._pace.turn():
            box = await BareBox.start(
                spec, self._dockerd, self._config(kind), lambda: self._new(spec.label), kind.image
            )
        if kind.image not in self._bare:
            self._bare[kind.image] = box.command_s
            _log.warning(
                "image %s has no Python 3.9 or newer for our init: its commands go by docker exec, %.0f ms each, and "
                "only these can be written: %s",
                spec.image or self._image, 1e3 * box.command_s, ", ".join(box.writable),
            )  # fmt: skip
        return box

    async def _kind(self, spec: BoxSpec) -> Kind:
        image = spec.image or self._image
        if not image:
            raise TaskError(f"box {spec.id}: its task names no image", hint="Set sandbox.image, or the task's own.")
        if image not in self._images:
            try:
                self._images[image] = await self._dockerd.image_id(image)
            except UnavailableError as e:
                raise (TaskError(str(e), hint=e.hint) if spec.image and self._engine else e) from e
        limits = spec.limits
        return Kind(
            label=spec.label,
            image=self._images[image],
            memory_mb=limits.memory_mb,
            disk_mb=limits.disk_mb,
            pids=limits.pids,
            network=limits.network,
        )

    async def _ready(self, kind: Kind, spec: BoxSpec) -> Container:
        """An idle container, else a new one, with the box's file system in it."""
        while True:
            kept = self._shelf.take(kind)
            ready = kept or await self._make(kind)
            try:
                await self.renew(ready, spec)
            except (ConnectionError, InfraError) as e:
                await asyncio.shield(self.discard(ready))
                if kept is None:
                    raise InfraError(f"box {spec.id}: its new container broke: {e}") from e
                continue
            except BaseException:
                await asyncio.shield(self.discard(ready))
                raise
            if kept is None and spec.label != "probe":
                self._prepare(kind)
            return ready

    async def renew(self, ready: Container, spec: BoxSpec) -> None:
        cpus = spec.cpus or self._cpus
        await ready.renew(workdir=spec.workdir, env=spec.env, cpus=cpus)
        if ready.portable:
            await self.move(ready, cpus)

    async def _make(self, kind: Kind) -> Container:
        name, labels = self._new(kind.label)
        async with self._pace.turn():
            made = await containers.start(
                self._dockerd, kind, name=name, labels=labels, config=self._config(kind), folder=self._folder / name
            )
        self._made.add(made)
        return made

    def _new(self, label: str) -> tuple[str, dict[str, str]]:
        """A name that does not repeat, and the labels."""
        return f"agentrl-{self._owner}-{next(self._numbers)}", {RUN: label, OWNER: self._owner}

    def _config(self, kind: Kind) -> dict[str, Any]:
        guards = self._engine.get("SecurityOptions") or []
        return containers.options(
            kind, network=self._settings.network, cpus=cgroups.cpu_list(self._cpus), guards=guards
        )

    def _prepare(self, kind: Kind) -> None:
        """Whoever comes next shall not wait as this one did: one container in advance, while there is room."""
        if len(self._shelf) + len(self.in_advance) >= self._settings.warm or self._closing:
            return
        task = asyncio.create_task(self._make_spare(kind), name="a container in advance")
        self.in_advance.add(task)
        task.add_done_callback(self.in_advance.discard)

    async def _make_spare(self, kind: Kind) -> None:
        try:
            await self.give_back(await self._make(kind))
        except (AgentRLError, OSError) as e:
            _log.warning("no container in advance: %s", e)

    async def release(self, used: Container) -> None:
        """Nothing of the box remains when this returns; its container waits for the next one, if there is room."""
        try:
            await used.renew()
        except (OSError, InfraError):
            await self.discard(used)
            return
        await self.give_back(used)

    async def give_back(self, ready: Container) -> None:
        spare = [ready] if self._closing or ready.kind.label == "probe" else self._shelf.put(ready.kind, ready)
        for one in spare:
            await self.discard(one)

    async def discard(self, one: Container) -> None:
        self._made.discard(one)
        one.control.close()  # its init ends at once, and all else in it
        await self._dockerd.remove(one.name)

    async def move(self, one: Container, cpus: tuple[int, ...]) -> None:
        """The portable way: 24 ms, by the engine."""
        if cpus == one.cpus:
            return
        text = cgroups.cpu_list(cpus)
        await self._dockerd.call(f"move {one.name}", lambda client: client.update_container(one.id, cpuset_cpus=text))
        one.cpus = cpus

    async def reap(self, label: str | None = None) -> int:
        found = await self._dockerd.labelled({OWNER: "", RUN: label or ""})
        dead = [c for c in found if not cgroups.owner_lives(c["Labels"][OWNER])]
        await asyncio.gather(*(self._dockerd.remove(c["Id"]) for c in dead))
        await asyncio.to_thread(self._reap_folders)
        return len(dead)

    def _reap_folders(self) -> None:
        for folder in self._folder.glob("agentrl-*"):
            if not cgroups.owner_lives(folder.name.removeprefix("agentrl-").rpartition("-")[0]):
                shutil.rmtree(folder, ignore_errors=True)

    async def aclose(self) -> None:
        """All that is ours goes, also what a call that timed out may have made."""
        self._closing = True
        for task in list(self.in_advance):
            task.cancel()
        if self.in_advance:
            await asyncio.wait(self.in_advance)
        for one in self._made:
            one.control.close()
        if self._engine:
            with contextlib.suppress(UnavailableError):  # an engine that is gone: its containers end with their sockets
                found = await self._dockerd.labelled({OWNER: self._owner})
                await asyncio.gather(*(self._dockerd.remove(c["Id"]) for c in found))
        self._dockerd.close()


class DockerBox(ChannelBox):
    """A box in a container that outlives it."""

    def __init__(self, spec: BoxSpec, backend: DockerBackend, home: Container) -> None:
        super().__init__(spec, home.control)
        self._backend, self.home = backend, home

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cpus: tuple[int, ...],
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        output_bytes: int = 0,
    ) -> ExecResult:
        if self.home.portable and cpus:
            await self._backend.move(self.home, cpus)
            cpus = ()
        return await super().exec(command, timeout_s=timeout_s, cpus=cpus, cwd=cwd, env=env, output_bytes=output_bytes)

    async def set_cpus(self, cpus: tuple[int, ...]) -> None:
        if self.home.portable:
            await self._backend.move(self.home, cpus)
        else:
            await super().set_cpus(cpus)

    async def reset(self) -> None:
        try:
            await self._backend.renew(self.home, self._spec)
        except (ConnectionError, DeadlineError) as e:
            raise SandboxLost(f"box {self.id} is gone: {e}", hint="Retry in a fresh sandbox.") from e

    async def kill(self) -> None:
        if not self._dead:
            self._dead = True
            await asyncio.shield(self._backend.release(self.home))

    async def _call(
        self, kind: bytes, head: dict[str, Any], blob: bytes = b"", *, deadline_s: float
    ) -> tuple[dict[str, Any], bytes]:
        answer = await super()._call(kind, head, blob, deadline_s=deadline_s)
        if self._dead:  # killed meanwhile: the answer is that of the sweep
            raise SandboxLost(f"box {self.id} is gone", hint="It was killed; open a fresh sandbox.")
        return answer
