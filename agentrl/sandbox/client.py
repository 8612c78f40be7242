"""The controller's end of the sandbox daemon: `SandboxClient` is a `ports.SandboxHost`."""

from __future__ import annotations

import asyncio
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from agentrl.errors import DeadlineError, SandboxLost, TaskError, UnavailableError
from agentrl.records import ExecResult, File, Lane, SandboxHostStatus, Task
from agentrl.sandbox import wire

T = TypeVar("T")

_GRACE_S = 60.0  # beyond what the daemon itself allows: it answers first, with a better reason
_QUICK_S = 30.0


class DaemonUnreachable(UnavailableError):
    """Nobody answers at the daemon's address, or hung up in the middle: it is gone."""


class SandboxClient:
    """Sandboxes of one daemon. endpoint: `unix:/path/to/socket` or `http://127.0.0.1:port`. Belongs to one event loop.

    The caller closes it with `aclose`; sandboxes it opened live on until closed or expired.
    """

    def __init__(
        self, endpoint: str, token: str, *, name: str = "local", queue_timeout_s: float = wire.QUEUE_TIMEOUT_S
    ) -> None:
        self._endpoint = endpoint
        self._name = name
        self._queue_timeout_s = queue_timeout_s
        path = endpoint.removeprefix("unix:")
        unix = path != endpoint
        self._base = "http://sandbox" if unix else endpoint.rstrip("/")
        # no cap of its own: lanes are where work queues, a second queue here would hide from their statistics
        connector = aiohttp.UnixConnector(path, limit=0) if unix else aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {token}"})

    @property
    def name(self) -> str:
        return self._name

    async def open(self, task: Task, *, label: str, lease_s: float, request_id: str) -> RemoteSandbox:
        files = await asyncio.to_thread(read_files, task)
        request = wire.Open(request_id=request_id, label=label, lease_s=lease_s, task=task, files=files)
        # place, lane, start, then each line of the set-up
        allowed = 2 * self._queue_timeout_s + _QUICK_S + len(task.setup) * task.command_timeout_s
        opened = await self._call("/boxes", request, wire.Opened, allowed)
        return RemoteSandbox(self, opened.box, (opened.queue_s, opened.run_s))

    async def status(self, *, deadline_s: float) -> SandboxHostStatus:
        status, body = await self._send("GET", "/status", b"", deadline_s)
        self._check(status, body)
        return msgspec.json.decode(body, type=SandboxHostStatus)

    async def gc(self, label: str | None = None) -> int:
        """Reap what dead daemons left on the host (of one run, or of all). How many sandboxes."""
        return await self._call("/gc", wire.Gc(label=label), int, self._queue_timeout_s)

    async def health(self, *, deadline_s: float, instance: str = "") -> bool:
        """Whether a daemon serves there (the one started as `instance`, if given). False where nobody answers."""
        try:
            status, body = await self._send("GET", "/health", b"", deadline_s)
        except (UnavailableError, DeadlineError):
            return False
        return status == 200 and (not instance or body.decode() == instance)

    async def aclose(self) -> None:
        await self._session.close()

    async def _call(self, path: str, request: object, kind: type[T], allowed_s: float) -> T:
        status, body = await self._send("POST", path, wire.encode(request), allowed_s + _GRACE_S)
        self._check(status, body)
        return wire.decode(body, kind)

    async def _send(self, method: str, path: str, body: bytes, deadline_s: float) -> tuple[int, bytes]:
        if self._session.closed:
            raise DaemonUnreachable(f"the client of sandbox daemon {self._name} is closed")
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(method, self._base + path, data=body, timeout=_NO_TIMEOUT) as response,
            ):
                return response.status, await response.read()
        except TimeoutError:
            raise DeadlineError(
                f"sandbox daemon {self._name} at {self._endpoint} gave no answer to {path} within {deadline_s:g} s",
                hint="Look at the daemon's log.",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise DaemonUnreachable(
                f"sandbox daemon {self._name} at {self._endpoint} is not reachable ({path}): {error!r}",
                hint="Look at the daemon's log; start it again with `agentrl sandbox up`.",
            ) from error

    def _check(self, status: int, body: bytes) -> None:
        if status == 401:
            raise UnavailableError(
                f"sandbox daemon {self._name} at {self._endpoint} refused the token",
                hint="Another run's daemon may serve there; check the token file.",
            )
        if status != 200:
            raise wire.error_of(wire.decode(body, wire.Failure))


class RemoteSandbox:
    """One lease at the daemon: a `ports.Sandbox`."""

    def __init__(self, client: SandboxClient, box: str, opened: tuple[float, float] = (0.0, 0.0)) -> None:
        self._client = client
        self._box = box
        self.opened = opened

    @property
    def id(self) -> str:
        return self._box

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        request_id: str,
        lane: Lane | None = None,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        request = wire.Exec(
            request_id=request_id, command=command, timeout_s=timeout_s, lane=lane, cwd=cwd, env=dict(env or {})
        )
        return await self._call("exec", request, ExecResult, self._client._queue_timeout_s + timeout_s)

    async def put(self, files: Mapping[str, File], *, request_id: str) -> None:
        request = wire.Put(request_id=request_id, files=dict(files))
        await self._call("put", request, type(None), self._client._queue_timeout_s + _QUICK_S)

    async def get(self, path: str, *, limit: int = 65_536) -> bytes:
        return await self._call("get", wire.Get(path=path, limit=limit), bytes, _QUICK_S)

    async def sweep(self) -> int:
        request = wire.Sweep(request_id=uuid.uuid4().hex)
        return await self._call("sweep", request, int, self._client._queue_timeout_s + _QUICK_S)

    async def renew(self, lease_s: float) -> None:
        """Start the lease anew with this time to live (every other call does so too, with the present one)."""
        await self._call("renew", wire.Renew(lease_s=lease_s), type(None), _QUICK_S)

    async def close(self) -> None:
        """A daemon that is gone has no sandbox left to close: that is not an error here."""
        try:
            await self._call("close", wire.Close(), type(None), self._client._queue_timeout_s + _QUICK_S)
        except SandboxLost:
            return

    async def _call(self, operation: str, request: object, kind: type[T], allowed_s: float) -> T:
        try:
            return await self._client._call(f"/boxes/{self._box}/{operation}", request, kind, allowed_s)
        except DaemonUnreachable as error:
            raise SandboxLost(f"sandbox {self._box}: {error}", hint=error.hint) from error


def read_files(task: Task) -> dict[str, File]:
    """The task's files as they are on this side, by their path in the sandbox; folders with all below them."""
    files: dict[str, File] = {}
    for inside, target in task.files:
        source = Path(task.root) / inside
        try:
            if source.is_dir():
                for path in sorted(p for p in source.rglob("*") if p.is_file()):
                    files[f"{target.rstrip('/')}/{path.relative_to(source).as_posix()}"] = _read(path)
            else:
                files[target] = _read(source)
        except OSError as error:
            raise TaskError(
                f"task {task.id}: cannot read {source}: {error.strerror}", hint="Repair the task's folder."
            ) from error
    return files


def _read(path: Path) -> File:
    return File(data=path.read_bytes(), mode=stat.S_IMODE(path.stat().st_mode))


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=None, sock_read=None, sock_connect=None)
