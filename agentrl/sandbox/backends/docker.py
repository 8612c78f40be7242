"""Boxes in Docker containers, by image. See docs/decisions/0016-docker-sandboxes.md.

A container holds our init; a box is a copy-on-write view of the image within it. Containers are started by the engine
(0.3 s) and then serve one box after another, each on a fresh file system (milliseconds). Commands go to the init over a
Unix socket, never through the engine. An image without Python gets slower boxes, by `docker exec` (`bare.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import DeadlineError, InfraError, SandboxLost, TaskError, UnavailableError
from agentrl.recipe import schema
from agentrl.records import ExecResult, Limits
from agentrl.sandbox.backends import container as containers
from agentrl.sandbox.backends.bare import BareBox
from agentrl.sandbox.backends.base import Box, BoxSpec
from agentrl.sandbox.backends.channel import ChannelBox
from agentrl.sandbox.backends.container import OWNER, RUN, Container, Kind, NoInterpreter
from agentrl.sandbox.backends.dockerd import Dockerd
from agentrl.sandbox.backends.inside import cgroups
from agentrl.sandbox.backends.pool import PROBE, Pool
from agentrl.sandbox.backends.warm import Pace

_CLOSE_S = 10.0  # for the engine to remove everything; the daemon's starter waits twice that

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
        self.pool = Pool(settings, self._make, self._dockerd.remove)
        self._pace = Pace(settings.starts, settings.starts_per_s)  # of boxes without an init
        self._numbers = itertools.count()
        self._engine: dict[str, Any] = {}
        self._images: dict[str, str] = {}  # name to id
        self._bare: dict[str, float] = {}  # ids of images without an interpreter: seconds of one command

    @property
    def isolation(self) -> str:
        engine = f"engine {self._engine['ServerVersion']}" if self._engine else "not asked yet"
        bare = ""
        if self._bare:
            slowest = 1e3 * max(self._bare.values())
            bare = f"; images without Python ({len(self._bare)}) by docker exec, {slowest:.0f} ms a command"
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
        box = await self.start(BoxSpec(id=f"probe-{os.getpid()}", label=PROBE, limits=Limits()))
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
        """A container with the box's file system in it."""
        while True:
            ready, new = await self.pool.take(kind)
            try:
                await self.renew(ready, spec)
            except (ConnectionError, InfraError) as e:
                self.pool.discard(ready)
                if new:
                    raise InfraError(f"box {spec.id}: its new container broke: {e}") from e
                continue
            except BaseException:
                self.pool.discard(ready)
                raise
            return ready

    async def _make(self, kind: Kind) -> Container:
        name, labels = self._new(kind.label)
        return await containers.start(
            self._dockerd, kind, name=name, labels=labels, config=self._config(kind), folder=self._folder / name
        )

    async def renew(self, ready: Container, spec: BoxSpec) -> None:
        cpus = spec.cpus or self._cpus
        await ready.renew(workdir=spec.workdir, env=spec.env, cpus=cpus)
        if ready.portable:
            await self.move(ready, cpus)

    def _new(self, label: str) -> tuple[str, dict[str, str]]:
        """A name that does not repeat, and the labels."""
        return f"agentrl-{self._owner}-{next(self._numbers)}", {RUN: label, OWNER: self._owner}

    def _config(self, kind: Kind) -> dict[str, Any]:
        guards = self._engine.get("SecurityOptions") or []
        return containers.options(
            kind, network=self._settings.network, cpus=cgroups.cpu_list(self._cpus), guards=guards
        )

    async def move(self, one: Container, cpus: tuple[int, ...]) -> None:
        """The portable way, by the engine: 13 ms on a quiet machine."""
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
        """All that is ours goes, also what a call that timed out may have made. What an engine has not removed in time
        it removes later: the inits are gone."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.pool.aclose()
                if self._engine:
                    found = await self._dockerd.labelled({OWNER: self._owner})
                    await asyncio.gather(*(self._dockerd.remove(c["Id"]) for c in found))
        except (TimeoutError, InfraError, UnavailableError) as e:
            _log.warning("containers are left to the engine, and to gc: %s", e or f"not removed in {_CLOSE_S:.0f} s")
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
            await asyncio.shield(self._backend.pool.release(self.home))

    async def _call(
        self, kind: bytes, head: dict[str, Any], blob: bytes = b"", *, deadline_s: float
    ) -> tuple[dict[str, Any], bytes]:
        answer = await super()._call(kind, head, blob, deadline_s=deadline_s)
        if self._dead:  # killed meanwhile: the answer is that of the sweep
            raise SandboxLost(f"box {self.id} is gone", hint="It was killed; open a fresh sandbox.")
        return answer
