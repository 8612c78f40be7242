"""Boxes made of Linux namespaces, by our own launcher: the default. See docs/decisions/0011-namespace-sandboxes.md."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import DeadlineError, InfraError, UnavailableError
from agentrl.records import Limits
from agentrl.sandbox.backends.base import Box, BoxSpec
from agentrl.sandbox.backends.channel import ChannelBox, call
from agentrl.sandbox.backends.inside import cgroups, launcher
from agentrl.sandbox.backends.spawn import PACKAGE, spawn

_START_S = 30.0
_END_S = 30.0
_PROBE_PIDS = 8


class NamespaceBackend:
    """root: lower layer of the boxes' file system. hide: further host paths masked. A launcher process starts with the
    first box and again where it died; `aclose` ends it with all its boxes."""

    name = "namespace"

    def __init__(self, *, root: str, state_dir: str, hide: Sequence[str] = ()) -> None:
        self._root = root
        self._base = Path(state_dir) / "namespace"
        self._hide = [str(PACKAGE), str(Path(state_dir).resolve()), *hide]
        self._groups = cgroups.detect()
        self._launcher: _Launcher | None = None
        self._starting = asyncio.Lock()

    @property
    def isolation(self) -> str:
        user = "real root with few capabilities" if os.getuid() == 0 else "one user in a user namespace"
        if isinstance(self._groups, str):
            limits = (
                "processes by RLIMIT_NPROC; memory by RLIMIT_DATA per process and a 0.25 s sampler for the box; "
                f"CPUs by affinity, which a command can undo ({self._groups})"
            )
        else:
            limits = f"memory, processes and CPUs by cgroups v{self._groups.version}"
        return (
            f"own mount, pid, net, ipc and uts namespaces, {user}; {limits}; files on a sized tmpfs; "
            "the kernel is shared with the host"
        )

    async def probe(self) -> None:
        """Starts the launcher and one box, so what works here is known, not guessed."""
        if os.getuid() == 0 and isinstance(self._groups, str):
            raise UnavailableError(
                f"sandbox backend namespace: as root, limits need control groups: {self._groups}",
                hint="Mount cgroups writable, or run as an ordinary user, where rlimits of a user namespace hold.",
            )
        box = await self.start(BoxSpec(id=f"probe-{os.getpid()}", label="probe", limits=Limits(pids=_PROBE_PIDS)))
        try:
            crowd = " ".join(["sleep 60 &"] * (_PROBE_PIDS + 16))
            result = await box.exec(f"exec /bin/sh -c '{crowd} wait'", timeout_s=10, cpus=())
        finally:
            await box.kill()
        if result.timed_out or result.exit_code == 0:
            raise UnavailableError(
                "sandbox backend namespace: the limit on processes does not hold on this kernel",
                hint="RLIMIT_NPROC counts per user namespace since Linux 5.14; as root, control groups do it.",
            )

    async def start(self, spec: BoxSpec) -> Box:
        try:
            return await self._start(spec)
        except ConnectionError:  # the launcher died: once more with a new one
            try:
                return await self._start(spec)
            except ConnectionError as e:
                raise UnavailableError(
                    f"sandbox backend namespace: the launcher keeps dying: {e}",
                    hint="Its words are in the daemon's log.",
                ) from e

    async def _start(self, spec: BoxSpec) -> Box:
        running = await self._running()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        head = {
            "id": spec.id,
            "label": spec.label,
            "memory_mb": spec.limits.memory_mb,
            "disk_mb": spec.limits.disk_mb,
            "pids": spec.limits.pids,
            "network": spec.limits.network,
            "workdir": spec.workdir,
            "env": spec.env,
            "cpus": spec.cpus,
        }
        box = NamespaceBox(spec, mine, running)
        try:
            with theirs:
                reply, _ = await call(running.control, launcher.START, head, deadline_s=_START_S, fds=[theirs.fileno()])
            if "error" in reply:
                raise InfraError(f"box {spec.id} does not start: {reply['error']}")
        except BaseException:
            await asyncio.shield(box.kill())
            raise
        return box

    async def _running(self) -> _Launcher:
        async with self._starting:
            if self._launcher is None or self._launcher.process.returncode is not None:
                if self._launcher is not None:
                    await self._launcher.end()
                await self.reap()
                self._launcher = await _launch(
                    launcher.Settings(
                        root=self._root, base=str(self._base), hide=self._hide,
                        cgroups=not isinstance(self._groups, str),
                    )
                )  # fmt: skip
            return self._launcher

    async def reap(self, label: str | None = None) -> int:
        if isinstance(self._groups, str):
            return 0  # without control groups a dead launcher leaves nothing: mounts and processes died with it
        return await asyncio.to_thread(self._groups.reap, label)

    async def aclose(self) -> None:
        if self._launcher is not None:
            running, self._launcher = self._launcher, None
            await running.end()


class _Launcher:
    def __init__(self, control: socket.socket, process: asyncio.subprocess.Process) -> None:
        self.control, self.process = control, process

    async def end(self) -> None:
        """All its boxes end with it. Idempotent."""
        self.control.close()
        try:
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


async def _launch(settings: launcher.Settings) -> _Launcher:
    await asyncio.to_thread(os.makedirs, settings.base, exist_ok=True)
    mine, process = await spawn(
        [sys.executable],
        "agentrl.sandbox.backends.inside.launcher",
        {launcher.SETTINGS: json.dumps(vars(settings))},
    )
    started = _Launcher(mine, process)
    try:
        async with asyncio.timeout(_START_S):
            answer = await asyncio.get_running_loop().sock_recv(mine, 4096)
    except BaseException as e:
        await asyncio.shield(started.end())
        if isinstance(e, TimeoutError):
            raise DeadlineError(f"the sandbox launcher said nothing for {_START_S:.0f} s") from None
        raise
    if answer != b"ok":
        await started.end()
        raise UnavailableError(
            f"sandbox backend namespace: {answer.decode() or 'the launcher ended at once'}",
            hint="Allow user namespaces (kernel.unprivileged_userns_clone, AppArmor), run as root, or use bubblewrap.",
        )
    return started


class NamespaceBox(ChannelBox):
    def __init__(self, spec: BoxSpec, control: socket.socket, running: _Launcher) -> None:
        super().__init__(spec, control)
        self._launcher = running

    async def kill(self) -> None:
        if self._dead:
            return
        self._closed()
        try:
            await call(self._launcher.control, launcher.KILL, {"id": self.id}, deadline_s=_START_S)
        except OSError:  # no launcher any more, and so no box
            await self._launcher.end()
