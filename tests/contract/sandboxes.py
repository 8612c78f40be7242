"""A real sandbox daemon process for tests, and what they ask of it again and again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from agentrl.errors import (
    UnavailableError,
)
from agentrl.records import Lane, LaneStatus, Task, TaskId
from agentrl.sandbox.client import RemoteSandbox, SandboxClient
from tests import dockerd

PATIENCE_S = 30.0


class Daemon:
    """A daemon process of its own, on a fresh folder unless one is given. A context manager: SIGTERM at the end."""

    def __init__(self, folder: Path, backend: str, *, label: str = "test", **config: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        sandbox = {"backend": backend, "image": dockerd.PYTHON, **config.pop("sandbox", {})}
        where = {} if "port" in config else {"socket": str(folder / "d.sock")}
        self.config = {
            "label": label,
            "token_file": str(folder / "token"),
            "state_dir": str(folder / "state"),
            "sandbox": sandbox,
            "queue_timeout_s": PATIENCE_S,
            **where,
            **config,
        }
        (folder / "config.json").write_text(json.dumps(self.config))
        self.endpoint = (
            f"unix:{self.config['socket']}" if "socket" in self.config else f"http://127.0.0.1:{config['port']}"
        )
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "agentrl.sandbox.daemon", "--config-file", str(self.folder / "config.json")]
        with self.log.open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def __enter__(self) -> Daemon:
        self.process = self.spawn()
        asyncio.run(self._wait_ready(self.process))
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process
        assert self.process.stdin
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self.process.stdin.close()

    async def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        client = SandboxClient(self.endpoint, "")
        async with asyncio.timeout(PATIENCE_S):
            while not await client.health(deadline_s=PATIENCE_S):
                if process.poll() is not None:
                    pytest.fail(f"the daemon ended with {process.returncode}: {self.log.read_text()}")
                await asyncio.sleep(0.01)
        await client.aclose()

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text()

    @contextlib.asynccontextmanager
    async def client(self, token: str | None = None) -> AsyncIterator[SandboxClient]:
        patience_s = float(self.config["queue_timeout_s"])
        client = SandboxClient(self.endpoint, self.token if token is None else token, queue_timeout_s=patience_s)
        try:
            yield client
        finally:
            await client.aclose()

    def run(self, scenario: Callable[[SandboxClient], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * PATIENCE_S), self.client() as client:
                await scenario(client)

        asyncio.run(main())


def require(backend: str) -> None:
    if backend == "namespace":
        from agentrl.sandbox.backends.namespace import NamespaceBackend

        async def probe() -> None:
            made = NamespaceBackend(root="/", state_dir=os.environ.get("TMPDIR", "/tmp") + f"/probe-{os.getpid()}")
            try:
                await made.probe()
            finally:
                await made.aclose()

        try:
            asyncio.run(probe())
        except UnavailableError as error:
            pytest.skip(f"no namespace sandboxes here: {error}")


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {"id": TaskId("t"), "kind": "k", "instruction": "", "root": "/nowhere", "trusted": True}
    return Task(**{**fields, **changes})


def rid() -> str:
    return uuid.uuid4().hex


@contextlib.asynccontextmanager
async def box(client: SandboxClient, lease_s: float = 60.0, **changes: Any) -> AsyncIterator[RemoteSandbox]:
    opened = await client.open(task(**changes), label="a", lease_s=lease_s, request_id=rid())
    try:
        yield opened
    finally:
        await opened.close()


async def sh(opened: RemoteSandbox, command: str, *, lane: Lane | None = None, timeout_s: float = 20.0) -> str:
    result = await opened.exec(command, timeout_s=timeout_s, request_id=rid(), lane=lane)
    assert result.exit_code == 0, result
    return result.output


async def until(client: SandboxClient, wanted: Callable[[dict[Lane, LaneStatus], int], bool]) -> None:
    """Asks the daemon for its status until it is as wanted. A status call is a round trip, so this does not spin."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await client.status(deadline_s=PATIENCE_S)
            if wanted({s.lane: s for s in status.lanes}, status.live):
                return


async def gone(marker: str) -> None:
    """Waits until no process has `marker` in its command line."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while await asyncio.to_thread(alive, marker):
        assert asyncio.get_running_loop().time() < deadline, f"{marker} still runs"


def alive(marker: str) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and marker in " ".join(process.cmdline()):
                return True
    return False


def marked() -> tuple[str, str]:
    """A command that runs for an hour, also in the background and in another session, and how to find it."""
    marker = f"36{uuid.uuid4().int % 10**12:012d}"
    return f"setsid sleep {marker} & sleep {marker}", marker
