"""No isolation: a scratch folder, a process group, limits per process. Only for tasks marked `trusted`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import SandboxLost, TaskError
from agentrl.records import ExecResult, File
from agentrl.sandbox.backends.base import Box, BoxSpec

_DRAIN_S = 0.1


class ProcessBackend:
    name = "process"
    isolation = "none: a scratch folder and a process group; trusted tasks only"

    def __init__(self, *, state_dir: str) -> None:
        self._dir = Path(state_dir) / "process"

    async def probe(self) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)

    async def start(self, spec: BoxSpec) -> Box:
        if not spec.trusted:
            raise TaskError(
                f"box {spec.id}: the process backend isolates nothing and the task is not marked trusted",
                hint="Use the namespace backend, or mark the task trusted if you would run its commands yourself.",
            )
        box = ProcessBox(spec, self._dir / spec.label / spec.id)
        await box.reset()
        return box

    async def reap(self, label: str | None = None) -> int:
        return 0

    async def aclose(self) -> None:
        pass


class ProcessBox:
    def __init__(self, spec: BoxSpec, scratch: Path) -> None:
        self._spec = spec
        self._scratch = scratch
        self._groups: set[int] = set()
        self._dead = False

    @property
    def id(self) -> str:
        return self._spec.id

    def _host(self, path: str) -> Path:
        return self._scratch / os.path.normpath("/" + path).lstrip("/")

    def _mapped(self, text: str) -> str:
        return text.replace(self._spec.workdir, str(self._host(self._spec.workdir)))

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
        if self._dead:
            raise SandboxLost(f"box {self.id} is gone")
        limit = output_bytes or self._spec.limits.output_bytes
        data = self._spec.limits.memory_mb << 20

        def prepare() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (data, data))
            if cpus:
                os.sched_setaffinity(0, cpus)

        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", self._mapped(command),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            cwd=self._host(cwd or self._spec.workdir),
            env={"PATH": os.environ["PATH"], **self._spec.env, **(env or {})},
            start_new_session=True, preexec_fn=prepare,
        )  # fmt: skip
        self._groups.add(process.pid)
        assert process.stdout is not None
        head, tail, total = bytearray(), bytearray(), 0

        async def pump(stream: asyncio.StreamReader) -> None:
            nonlocal total
            while chunk := await stream.read(65536):
                total += len(chunk)
                room = limit // 2 - len(head)
                head.extend(chunk[: max(room, 0)])
                tail.extend(chunk[max(room, 0) :])
                del tail[: max(0, len(tail) - limit // 2)]

        reader = asyncio.ensure_future(pump(process.stdout))
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            timed_out = True
        finally:
            if process.returncode is None:
                self._kill(process.pid)
                await process.wait()
            await asyncio.wait([reader], timeout=_DRAIN_S)
            reader.cancel()
        truncated = total > len(head) + len(tail)
        cut = f"\n[... {total - len(head) - len(tail)} bytes cut ...]\n" if truncated else ""
        code = await process.wait()
        return ExecResult(
            exit_code=None if timed_out else (128 - code if code < 0 else code),
            output=head.decode(errors="replace") + cut + tail.decode(errors="replace"),
            total_bytes=total, truncated=truncated, timed_out=timed_out, run_s=time.monotonic() - began,
        )  # fmt: skip

    def _kill(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    async def set_cpus(self, cpus: tuple[int, ...]) -> None:
        pass

    async def put(self, files: Mapping[str, File]) -> None:
        for path, file in files.items():
            target = self._host(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.data)
            target.chmod(file.mode)

    async def get(self, path: str, limit: int) -> bytes:
        with self._host(path).open("rb") as f:
            return f.read(limit)

    async def sweep(self) -> int:
        for group in self._groups:
            self._kill(group)
        count = len(self._groups)
        self._groups.clear()
        return count

    async def reset(self) -> None:
        await self.sweep()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._host(self._spec.workdir).mkdir(parents=True)

    async def kill(self) -> None:
        self._dead = True
        await self.sweep()
        shutil.rmtree(self._scratch, ignore_errors=True)
