"""No isolation: a scratch folder, a process tree, limits per process. Only for tasks marked `trusted`.

A command names absolute paths (`/work`, `/tests/run.sh`) and there is no file system of its own to hold them. So the
work folder, the folders that files were put into, and Harbor's own are kept below the scratch folder, and their names
are rewritten where they stand in a command or in a text file put into the box, and back in the output. A path that a
program composes while it runs is not seen: such a task needs the namespace backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agentrl.errors import DeadlineError, InfraError, TaskError
from agentrl.records import ExecResult, File
from agentrl.sandbox.backends.base import Box, BoxSpec
from agentrl.sandbox.backends.channel import ChannelBox
from agentrl.sandbox.backends.inside import cgroups, plain
from agentrl.sandbox.backends.spawn import spawn

_START_S = 30.0
_HARBOR = ("/tests", "/logs", "/solution")


class ProcessBackend:
    name = "process"
    isolation = (
        "none: commands run as this user and see this machine; time limits hold, memory by RLIMIT_DATA per process and "
        "a 0.25 s sampler, processes by that sampler, disk per file only, CPUs by affinity; trusted tasks only"
    )

    def __init__(self, *, state_dir: str) -> None:
        self._dir = Path(state_dir).resolve() / "process"
        self._owner = f"{os.getpid()}-{cgroups.start_time(os.getpid())}"

    async def probe(self) -> None:
        await asyncio.to_thread(self._dir.mkdir, parents=True, exist_ok=True)

    async def start(self, spec: BoxSpec) -> Box:
        if not spec.trusted:
            raise TaskError(
                f"box {spec.id}: the process backend isolates nothing and the task is not marked trusted",
                hint="Use the namespace backend, or mark the task trusted if you would run its commands yourself.",
            )
        scratch = self._dir / spec.label / f"{spec.id}@{self._owner}"
        paths = _Paths(scratch, spec.workdir)
        settings = {
            "scratch": str(scratch),
            "workdir": paths.host(spec.workdir),
            "env": {"PATH": os.environ.get("PATH", os.defpath), "HOME": f"{scratch}/root", "TMPDIR": f"{scratch}/tmp"}
            | {name: paths.inward(value) for name, value in spec.env.items()},
            "memory_mb": spec.limits.memory_mb,
            "disk_mb": spec.limits.disk_mb,
            "pids": spec.limits.pids,
        }
        control, process = await spawn(
            [sys.executable], "agentrl.sandbox.backends.inside.plain", {plain.SETTINGS: json.dumps(settings)}
        )
        box = ProcessBox(spec, control, process, paths)
        try:
            async with asyncio.timeout(_START_S):
                answer = await asyncio.get_running_loop().sock_recv(control, 64)
        except BaseException as e:
            await asyncio.shield(box.kill())
            if isinstance(e, TimeoutError):
                raise DeadlineError(f"box {spec.id}: its init said nothing for {_START_S:.0f} s") from None
            raise
        if answer != b"ok":
            await box.kill()
            raise InfraError(
                f"box {spec.id} does not start in {scratch}", hint="Is there space, and the right to write?"
            )
        return box

    async def reap(self, label: str | None = None) -> int:
        return await asyncio.to_thread(self._reap, label)

    def _reap(self, label: str | None) -> int:
        count = 0
        for run in self._dir.glob("*" if label is None else label):
            for scratch in run.iterdir():
                if not cgroups.owner_lives(scratch.name.rpartition("@")[2]):
                    shutil.rmtree(scratch, ignore_errors=True)
                    count += 1
            with contextlib.suppress(OSError):  # other boxes of this run live
                run.rmdir()
        return count

    async def aclose(self) -> None:
        """Each box ends with its own control socket."""


class _Paths:
    """Names inside the box to names below the scratch folder, in text and back."""

    def __init__(self, scratch: Path, workdir: str) -> None:
        self._scratch = str(scratch)
        self._inside = {workdir, *_HARBOR}
        self._compile()

    def _compile(self) -> None:
        names = "|".join(re.escape(p) for p in sorted(self._inside, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w./$}}~-])(?:{names})(?![\w.-])")

    def learn(self, path: str) -> None:
        """From now on `path` is a name of the box: with its top folder, unless this machine has one of that name."""
        top = "/" + path.strip("/").split("/")[0]
        self._inside.add(path if os.path.lexists(top) else top)
        self._compile()

    def host(self, path: str) -> str:
        return self._scratch + os.path.normpath("/" + path.lstrip("/"))

    def inward(self, text: str) -> str:
        return self._pattern.sub(lambda m: self._scratch + m.group(), text)

    def outward(self, text: str) -> str:
        return text.replace(self._scratch, "")

    def file(self, file: File) -> File:
        try:
            text = file.data.decode()
        except UnicodeDecodeError:
            return file
        return File(data=self.inward(text).encode(), mode=file.mode)


class ProcessBox(ChannelBox):
    def __init__(
        self, spec: BoxSpec, control: socket.socket, process: asyncio.subprocess.Process, paths: _Paths
    ) -> None:
        super().__init__(spec, control)
        self._process, self._paths = process, paths

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
        result = await super().exec(
            self._paths.inward(command),
            timeout_s=timeout_s,
            cpus=cpus,
            cwd=self._paths.host(cwd) if cwd else "",
            env={name: self._paths.inward(value) for name, value in (env or {}).items()},
            output_bytes=output_bytes,
        )
        return msgspec.structs.replace(result, output=self._paths.outward(result.output))

    async def put(self, files: Mapping[str, File]) -> None:
        for path in files:
            self._paths.learn(path)
        await super().put({self._paths.host(path): self._paths.file(file) for path, file in files.items()})

    async def get(self, path: str, limit: int) -> bytes:
        return await super().get(self._paths.host(path), limit)

    async def kill(self) -> None:
        """The init kills its tree and removes the scratch folder when its socket ends."""
        if not self._dead:
            self._closed()
        await self._process.wait()
