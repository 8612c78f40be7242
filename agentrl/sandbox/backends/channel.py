"""The daemon's side of a box that has an init (`inside/init.py`): one socket pair per call, its hang-up cancels."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import DeadlineError, InfraError, SandboxLost
from agentrl.records import ExecResult, File
from agentrl.sandbox.backends.base import BoxSpec
from agentrl.sandbox.backends.inside import init, wire

_GRACE_S = 15.0  # beyond the command's own time: the kill of its tree is bounded by 5 s on the far side
_CONTROL_S = 30.0  # a call that only the init or the launcher answers
_GROW_BYTES = 1 << 20
_SETTLE_S = 10.0  # after a cancel: for the far side to have killed the command


async def call(
    control: socket.socket,
    kind: bytes,
    head: Mapping[str, Any],
    blob: bytes = b"",
    *,
    deadline_s: float,
    fds: Sequence[int] = (),
) -> tuple[dict[str, Any], bytes]:
    """One request over `control`, with further descriptors to hand over. A cancelled call returns only once the far
    side has let go of it. ConnectionError where nobody is there, DeadlineError where nobody answers."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    with mine:
        with theirs:
            await _send_fds(control, kind, [theirs.fileno(), *fds])
        try:
            async with asyncio.timeout(deadline_s):
                return await _exchange(mine, wire.pack(dict(head), blob))
        except TimeoutError:
            raise DeadlineError(f"no answer within {deadline_s:.0f} s") from None
        except asyncio.CancelledError:
            await asyncio.shield(_settle(mine))
            raise


async def _send_fds(control: socket.socket, kind: bytes, fds: Sequence[int]) -> None:
    while True:
        try:
            socket.send_fds(control, [kind], fds)
            return
        except BlockingIOError:  # more calls on their way than the socket's buffer holds
            await _writable(control)


async def _writable(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    spare = control.dup()  # several calls may wait at once, and a loop takes one callback per descriptor
    loop.add_writer(spare.fileno(), ready.set)
    try:
        async with asyncio.timeout(_CONTROL_S):
            await ready.wait()
    finally:
        loop.remove_writer(spare.fileno())
        spare.close()


async def _exchange(mine: socket.socket, frame: bytes) -> tuple[dict[str, Any], bytes]:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(mine, frame)
    first = await _exactly(mine, wire.HEADER.size)
    head, blob = wire.HEADER.unpack(first)
    return wire.parse(await _exactly(mine, head)), await _exactly(mine, blob)


async def _exactly(mine: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        chunk = await loop.sock_recv(mine, min(count - len(data), 1 << 20))
        if not chunk:
            raise ConnectionResetError("the box hung up")
        data += chunk
    return bytes(data)


async def _settle(mine: socket.socket) -> None:
    """Hang up, then wait for the other side's end of the stream: the killing is done."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        mine.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_SETTLE_S):
            while await loop.sock_recv(mine, 1 << 16):
                pass


class ChannelBox:
    """A box behind an init. Subclasses say how it is reset and killed."""

    def __init__(self, spec: BoxSpec, control: socket.socket) -> None:
        self._spec = spec
        self._opened(control)

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
        head = {
            "op": "exec",
            "command": command,
            "timeout_s": timeout_s,
            "cpus": cpus,
            "cwd": cwd,
            "env": dict(env or {}),
            "output_bytes": output_bytes or self._spec.limits.output_bytes,
        }
        reply, blob = await self._call(init.CALL, head, deadline_s=timeout_s + _GRACE_S)
        if "error" in reply:
            return self._no_start(reply)
        return result_of(reply, blob)

    def _no_start(self, reply: dict[str, Any]) -> ExecResult:
        """Data, not a fault of ours: what runs in the box leaves no room for another process."""
        if reply["error"] == "fork":
            text = f"sandbox: cannot fork: earlier commands use up the limit of {self._spec.limits.pids} processes\n"
            return ExecResult(exit_code=126, output=text, total_bytes=len(text))
        raise SandboxLost(f"box {self.id}: {reply['error']}", hint="Retry in a fresh sandbox.")

    async def set_cpus(self, cpus: tuple[int, ...]) -> None:
        await self._must(init.CPUS, {"op": "move", "cpus": cpus})

    async def put(self, files: Mapping[str, File]) -> None:
        listing = [(path, file.mode, len(file.data)) for path, file in files.items()]
        head, blob = {"op": "put", "files": listing}, b"".join(f.data for f in files.values())
        reply, _ = await self._call(init.CALL, head, blob, deadline_s=_CONTROL_S)
        if reply.get("errno") == errno.ENOSPC:  # a command filled the disk, and what comes now may be its verifier
            await self._must(init.GROW, {"bytes": len(blob) + _GROW_BYTES + 4096 * len(files)})
            await self._must(init.CALL, head, blob)
        elif "error" in reply:
            raise self._fault(reply)

    async def get(self, path: str, limit: int) -> bytes:
        reply, data = await self._must(init.CALL, {"op": "get", "path": path, "limit": limit})
        if reply.get("absent"):
            raise FileNotFoundError(f"box {self.id}: no regular file {path}")
        return data

    async def sweep(self) -> int:
        reply, _ = await self._must(init.SWEEP, {})
        return int(reply["swept"])

    async def reset(self) -> None:
        await self._must(init.RESET, {})

    async def _must(self, kind: bytes, head: dict[str, Any], blob: bytes = b"") -> tuple[dict[str, Any], bytes]:
        reply, data = await self._call(kind, head, blob, deadline_s=_CONTROL_S)
        if "error" in reply:
            raise self._fault(reply)
        return reply, data

    def _fault(self, reply: dict[str, Any]) -> InfraError:
        if reply["error"] == "fork":
            return InfraError(f"box {self.id}: no room for another process", hint="Sweep it first.")
        return InfraError(f"box {self.id}: {reply['error']}")

    async def _call(
        self, kind: bytes, head: dict[str, Any], blob: bytes = b"", *, deadline_s: float
    ) -> tuple[dict[str, Any], bytes]:
        if self._dead:
            raise SandboxLost(f"box {self.id} is gone", hint="It was killed; open a fresh sandbox.")
        try:
            return await call(self._control, kind, head, blob, deadline_s=deadline_s)
        except (ConnectionError, DeadlineError) as e:
            raise SandboxLost(f"box {self.id} is gone: {e}", hint="Retry in a fresh sandbox.") from e

    def _opened(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control, self._dead = control, False

    def _closed(self) -> None:
        self._dead = True
        self._control.close()


def result_of(reply: dict[str, Any], blob: bytes) -> ExecResult:
    code, killed, total = reply["exit"], reply["killed"], reply["total"]
    if code is not None and code < 0:
        code = 128 - code
    oom = reply["oom"] and code != 0
    text = blob.decode(errors="replace")
    if total > len(blob):
        head, tail = blob[: reply["head"]], blob[reply["head"] :]
        cut = f"\n[... {total - len(blob)} bytes cut ...]\n"
        text = head.decode(errors="replace") + cut + tail.decode(errors="replace")
    if killed == "disk":
        text += "\nsandbox: killed at the disk limit\n"
    return ExecResult(
        exit_code=None if oom and code == 137 else code,
        output=text,
        total_bytes=total,
        truncated=total > len(blob),
        timed_out=killed == "timeout",
        oom=oom,
        run_s=reply["run_s"],
    )
