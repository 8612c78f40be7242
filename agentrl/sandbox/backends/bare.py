"""Boxes of images in which our init cannot run: every command by `docker exec`.

Slower (three calls to the engine for a command) and narrower, for no limit is given up: the image is read-only, and
what can be written is a few folders, each a sized tmpfs. Needs root, because only the host can end a command's whole
tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import tarfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import InfraError, SandboxLost, TaskError, UnavailableError
from agentrl.records import ExecResult, File
from agentrl.sandbox.backends.base import BoxSpec
from agentrl.sandbox.backends.channel import result_of
from agentrl.sandbox.backends.container import COMMANDS, launch
from agentrl.sandbox.backends.dockerd import Dockerd
from agentrl.sandbox.backends.inside import cgroups, wire
from agentrl.sandbox.backends.inside.supervisor import Output

_WRITABLE = ("/tmp", "/var/tmp", "/root", "/run", "/tests", "/logs", "/solution")
_MARK = "AGENTRL_COMMAND"  # in the environment of a command and all its descendants
_ARGUMENT_BYTES = 128 << 10
_EXEC_S = 30.0  # of our own commands
_KILL_S = 5.0
_POLL_S = 0.02
_SHELL = """\
exec 2>&1
[ -z "$1" ] || cd "$1" 2>/dev/null || { echo "sandbox: cannot start the command: no folder $1"; exit 126; }
[ -x /bin/bash ] && exec /bin/bash -c "$0"
exec /bin/sh -c "$0"
"""
# Docker's init reaps, and lives as long as this shell, which waits for ever: nobody writes to it. It is another user's
# than the commands, who may not signal it: `kill -9 -1` shall not take the box.
_WAIT, _WAITER = "read -r _", "65534:65534"
_PUT = 'for f; do rm -f -- "$f"; done; exec tar -xf - -C /'
_GET = '[ -f "$0" ] || exit 44; exec head -c "$1" -- "$0"'
_ABSENT = 44

Named = Callable[[], tuple[str, dict[str, str]]]


class BareBox:
    """command_s: seconds that a command takes which does nothing, measured at the start. writable: folders."""

    command_s = 0.0

    def __init__(self, spec: BoxSpec, dockerd: Dockerd, config: Mapping[str, Any], named: Named, image: str) -> None:
        self._spec, self._dockerd, self._named, self._image = spec, dockerd, named, image
        self.writable = sorted({*_WRITABLE, spec.workdir} - {"/", ""})
        size = f"rw,exec,nosuid,nodev,size={spec.limits.disk_mb}m"
        tmpfs = {folder: size + (",mode=1777" if folder in ("/tmp", "/var/tmp") else "") for folder in self.writable}
        self._config = {**config, "tmpfs": tmpfs, "shm_size": f"{spec.limits.disk_mb}m", "init": True}
        self._config["cap_add"] = sorted({*COMMANDS} - {"KILL"})
        self._dead = True

    @classmethod
    async def start(
        cls, spec: BoxSpec, dockerd: Dockerd, config: Mapping[str, Any], named: Named, image: str
    ) -> BareBox:
        if os.getuid() != 0:
            raise UnavailableError(
                f"box {spec.id}: image {image} has no Python 3.9 or newer, and without it the daemon must be root",
                hint="Add python3 to the image, or run the sandbox daemon as root.",
            )
        box = cls(spec, dockerd, config, named, image)
        await box._begin()
        return box

    async def _begin(self) -> None:
        self._name, labels = self._named()
        try:
            made = await launch(
                self._dockerd, self._image, name=self._name, labels=labels,
                command=["/bin/sh", "-c", _WAIT], config=self._config, user=_WAITER, stdin=True,
            )  # fmt: skip
            state = await self._dockerd.call("inspect", lambda client: client.inspect_container(made)["State"])
            group = cgroups.of_container(f"/proc/{state['Pid']}/cgroup", made)
            if group is None:
                raise UnavailableError("sandbox backend docker: the engine's control groups cannot be seen from here")
            self._id, self._group, self._dead = made, group, False
            began = time.monotonic()
            await self._run(["/bin/sh", "-c", ":"], timeout_s=_EXEC_S)
            self.command_s = time.monotonic() - began
            while len(own := set(_processes(group))) < 2:  # the init has not started its shell yet
                await self._run(["/bin/sh", "-c", ":"], timeout_s=_EXEC_S)
            self._own = own
        except BaseException:
            await asyncio.shield(self._dockerd.remove(self._name))
            raise

    @property
    def id(self) -> str:
        return self._spec.id

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
        if not _runnable(command):
            text = "sandbox: cannot start the command: no argument of a program can be like it\n"
            return ExecResult(exit_code=126, output=text, total_bytes=len(text))
        if cpus:
            await self.set_cpus(cpus)
        reply, blob = await self._run(
            ["/bin/sh", "-c", _SHELL, command, cwd or self._spec.workdir],
            env={"HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "TERM": "dumb", **self._spec.env, **(env or {})},
            timeout_s=timeout_s,
            output_bytes=output_bytes or self._spec.limits.output_bytes,
        )
        return result_of(reply, blob)

    async def set_cpus(self, cpus: tuple[int, ...]) -> None:
        self._alive()
        fd = await asyncio.to_thread(os.open, f"{self._group.cpuset}/cpuset.cpus", os.O_WRONLY | os.O_CLOEXEC)
        try:
            cgroups.move(fd, cpus)
        finally:
            os.close(fd)

    async def put(self, files: Mapping[str, File]) -> None:
        blob = io.BytesIO()
        with tarfile.open(fileobj=blob, mode="w") as tar:
            for path, file in files.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(file.data), file.mode
                tar.addfile(entry, io.BytesIO(file.data))
        argv = ["/bin/sh", "-c", _PUT, "put", *files]
        reply, said = await self._run(argv, timeout_s=_EXEC_S, stdin=blob.getvalue())
        if reply["exit"] == 127:
            raise TaskError(f"image {self._spec.image or self._image} has neither Python nor tar", hint="Add one.")
        if reply["exit"] != 0:
            raise InfraError(f"box {self.id}: files cannot be put: {said.decode(errors='replace')[-200:]}")

    async def get(self, path: str, limit: int) -> bytes:
        argv = ["/bin/sh", "-c", _GET, path, str(limit)]
        reply, data = await self._run(argv, timeout_s=_EXEC_S, output_bytes=2 * limit + 4096)
        if reply["exit"] != 0:
            raise FileNotFoundError(f"box {self.id}: no regular file {path}")
        return data[:limit]

    async def sweep(self) -> int:
        self._alive()
        return len(await self._kill(lambda pid: pid not in self._own))

    async def reset(self) -> None:
        await self.kill()
        await self._begin()

    async def kill(self) -> None:
        if not self._dead:
            self._dead = True
            await asyncio.shield(self._dockerd.remove(self._name))

    # --- one command -------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._dead:
            raise SandboxLost(f"box {self.id} is gone", hint="It was killed; open a fresh sandbox.")

    async def _run(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None,
        output_bytes: int = 4096, stdin: bytes = b"",
    ) -> tuple[wire.Head, bytes]:  # fmt: skip
        """As `supervisor.run` answers: how it ended, and its output."""
        self._alive()
        mark, before = uuid.uuid4().hex, set(_processes(self._group))
        output, oom = Output(output_bytes), _oom_kills(self._group)
        began, killed, code = time.monotonic(), "", None
        try:
            async with asyncio.timeout(timeout_s):
                code = await self._exec(list(argv), {**(env or {}), _MARK: mark}, output, stdin)
        except TimeoutError:
            killed = "timeout"
            await self._end(mark, before)
        except asyncio.CancelledError:
            await asyncio.shield(self._end(mark, before))
            raise
        except (InfraError, UnavailableError, OSError) as e:
            raise SandboxLost(f"box {self.id} is gone: {e}", hint="Retry in a fresh sandbox.") from e
        self._alive()
        head, tail = output.parts
        answer = wire.ended(
            code, killed, oom=_oom_kills(self._group) > oom, total=output.total, head=len(head),
            run_s=time.monotonic() - began,
        )  # fmt: skip
        return answer, head + tail

    async def _exec(self, argv: list[str], env: Mapping[str, str], output: Output, stdin: bytes) -> int:
        made = await self._dockerd.call(
            "exec",
            lambda client: client.exec_create(self._id, argv, environment=dict(env), stdin=bool(stdin), user="0:0"),
        )
        async with self._dockerd.started(made["Id"]) as stream:
            if stdin:
                stream.write(stdin)
            async for chunk in stream.chunks():
                output.add(chunk)
        while True:
            state = await self._dockerd.call("look at an exec", lambda client: client.exec_inspect(made["Id"]))
            if not state["Running"]:
                return int(state["ExitCode"])
            await asyncio.sleep(_POLL_S)  # it closed its output and goes on: the engine tells nobody when it ends

    async def _end(self, mark: str, before: set[int]) -> None:
        """All that descends from one command. One whose mark was removed from its environment is known by its age."""
        await self._kill(lambda pid: (found := _mark_of(pid)) == mark or (not found and pid not in before))

    async def _kill(self, doomed: Callable[[int], bool]) -> set[int]:
        killed: set[int] = set()
        async with asyncio.timeout(_KILL_S):
            while found := [pid for pid in _processes(self._group) if doomed(pid) and not _ended(pid)]:
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                killed.update(found)
                await asyncio.sleep(_POLL_S / 10)
        return killed


def _runnable(command: str) -> bool:
    try:
        return "\0" not in command and len(command.encode()) < _ARGUMENT_BYTES
    except UnicodeEncodeError:
        return False


def _processes(group: cgroups.Group) -> list[int]:
    try:
        return [int(pid) for pid in Path(group.pids, "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _ended(pid: int) -> bool:
    return _read(pid, "stat").rpartition(b")")[2].split()[:1] in ([], [b"Z"], [b"X"])


def _mark_of(pid: int) -> str:
    words = _read(pid, "environ").split(b"\0")
    return next((w.partition(b"=")[2].decode() for w in words if w.startswith(f"{_MARK}=".encode())), "")


def _read(pid: int, name: str) -> bytes:
    """Nothing of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _oom_kills(group: cgroups.Group) -> int:
    try:
        fd = group.oom_handle()
    except OSError:
        return 0
    try:
        return cgroups.oom_kills(fd)
    finally:
        os.close(fd)
