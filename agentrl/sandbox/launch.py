"""Starts the daemon on a host and keeps one there: `SandboxService` is a `ports.SandboxHost` that outlives it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass

import msgspec

from agentrl.errors import DeadlineError, UnavailableError
from agentrl.ports import Host, Process
from agentrl.recipe import schema
from agentrl.records import SandboxHostStatus, Task
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.client import DaemonUnreachable, RemoteSandbox, SandboxClient
from agentrl.sandbox.daemon import SOCKET_PATH_MAX, DaemonConfig

_COMMAND_S = 10.0
_RETRY_S = 0.02
_WRITE = 'umask 077; mkdir -p "$1" && printf %s "$3" > "$2"'


@dataclass(frozen=True)
class Paths:
    """Where one run's daemon keeps its things, below the run's folder on the daemon's host."""

    run_dir: str

    @classmethod
    def below(cls, run_dir: str) -> Paths:
        return cls(os.path.abspath(run_dir))  # noqa: PTH100 (a name on the host, not an object on this side)

    @property
    def state(self) -> str:
        return f"{self.run_dir}/sandbox"

    @property
    def config(self) -> str:
        return f"{self.state}/daemon.json"

    @property
    def token(self) -> str:
        return f"{self.state}/token"

    @property
    def log(self) -> str:
        return f"{self.run_dir}/logs/sandbox.log"

    @property
    def socket(self) -> str:
        """In the state folder; where that is too long a name for the kernel, in the temporary folder."""
        path = f"{self.state}/daemon.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
            return path
        digest = hashlib.sha256(os.fsencode(self.run_dir)).hexdigest()[:16]
        return f"{tempfile.gettempdir()}/agentrl-{os.getuid()}-{digest}.sock"


async def start_daemon(
    host: Host, sandbox: schema.Sandbox, *, run_dir: str, label: str, python: str = sys.executable
) -> tuple[SandboxClient, Process]:
    """A daemon that serves, and the client of it. UnavailableError with the log's end where it does not come up in
    `sandbox.start_timeout_s`. The caller closes the client and stops the process, in this order."""
    paths = Paths.below(run_dir)
    config = DaemonConfig(
        name=host.name,
        label=label,
        socket=paths.socket,
        token_file=paths.token,
        state_dir=paths.state,
        sandbox=sandbox,
        hide=(paths.run_dir,),
    )
    text = msgspec.json.format(msgspec.json.encode(config)).decode()
    await _run(host, ["sh", "-c", _WRITE, "sh", paths.state, paths.config, text])
    argv = [python, "-m", "agentrl.sandbox.daemon", "--config-file", paths.config]
    process = await host.start(argv, log=paths.log, label="sandbox daemon")
    try:
        async with asyncio.timeout(sandbox.start_timeout_s):
            return await _ready(host, paths, process), process
    except TimeoutError:
        await process.stop()
        raise UnavailableError(
            f"the sandbox daemon on {host.name} was not ready within {sandbox.start_timeout_s:g} s; {paths.log} ends:\n"
            + await _tail(host, paths.log),
            hint="Read the log; raise sandbox.start_timeout_s on a slow host.",
        ) from None
    except BaseException:
        await process.stop()
        raise


async def attach(host: Host, *, run_dir: str) -> SandboxClient:
    """A client of the daemon that a run started. UnavailableError where none left its token there."""
    paths = Paths.below(run_dir)
    token = await _run(host, ["cat", paths.token])
    return SandboxClient(f"unix:{paths.socket}", token.strip(), name=host.name)


async def gc(sandbox: schema.Sandbox, *, run_dir: str, label: str | None = None) -> int:
    """Remove what dead daemons left on this machine, of one run or of all; no daemon needed. How many sandboxes."""
    state_dir = Paths.below(run_dir).state
    backend = make_backend(sandbox.backend, root=sandbox.root, state_dir=state_dir)
    try:
        return await backend.reap(label)
    finally:
        await backend.aclose()


class SandboxService:
    """A daemon of ours on `host`, started by `start`, started again by the next `open` after it died.

    What lived in a dead daemon is lost (SandboxLost); its leftovers are reaped by the next one.
    """

    def __init__(self, host: Host, sandbox: schema.Sandbox, *, run_dir: str, label: str) -> None:
        self._host = host
        self._sandbox = sandbox
        self._run_dir = run_dir
        self._label = label
        self._starting = asyncio.Lock()
        self._running: tuple[SandboxClient, Process] | None = None
        self._retired: list[SandboxClient] = []  # their sandboxes still answer: SandboxLost
        self.restarts = 0

    @property
    def name(self) -> str:
        return self._host.name

    async def start(self) -> None:
        await self._client()

    async def open(self, task: Task, *, label: str, lease_s: float, request_id: str) -> RemoteSandbox:
        client = await self._client()
        try:
            return await client.open(task, label=label, lease_s=lease_s, request_id=request_id)
        except DaemonUnreachable:
            client = await self._client(instead_of=client)
            return await client.open(task, label=label, lease_s=lease_s, request_id=request_id)

    async def status(self, *, deadline_s: float) -> SandboxHostStatus:
        async with asyncio.timeout(deadline_s):
            client = await self._client()
        return await client.status(deadline_s=deadline_s)

    async def aclose(self) -> None:
        """Stops the daemon, which closes all its sandboxes. Idempotent."""
        async with self._starting:
            running, self._running = self._running, None
            if running:
                await self._retire(running)
            for client in self._retired:
                await client.aclose()

    async def _client(self, instead_of: SandboxClient | None = None) -> SandboxClient:
        async with self._starting:
            if self._running and self._running[0] is not instead_of:
                return self._running[0]
            if self._running:
                if self.restarts >= self._sandbox.restarts:
                    raise UnavailableError(
                        f"the sandbox daemon on {self.name} died {self.restarts + 1} times",
                        hint=f"Read {Paths.below(self._run_dir).log}; sandbox.restarts is {self._sandbox.restarts}.",
                    )
                self.restarts += 1
                dead, self._running = self._running, None
                await self._retire(dead)
            self._running = await start_daemon(self._host, self._sandbox, run_dir=self._run_dir, label=self._label)
            return self._running[0]

    async def _retire(self, running: tuple[SandboxClient, Process]) -> None:
        client, process = running
        await process.stop(grace_s=20.0)
        self._retired.append(client)


async def _ready(host: Host, paths: Paths, process: Process) -> SandboxClient:
    """Waits for the daemon's socket (a host has no event for that, so it is tried) or for its end (an event)."""
    ended = asyncio.ensure_future(process.wait())
    probe = SandboxClient(f"unix:{paths.socket}", "", name=host.name)
    try:
        while not await probe.health(deadline_s=_COMMAND_S):
            if (await asyncio.wait([ended], timeout=_RETRY_S))[0]:
                raise UnavailableError(
                    f"the sandbox daemon on {host.name} ended with exit code {ended.result()}; {paths.log} ends:\n"
                    + await _tail(host, paths.log),
                    hint="Mend what the log names.",
                )
        token = await _run(host, ["cat", paths.token])
    finally:
        ended.cancel()
        await probe.aclose()
    return SandboxClient(f"unix:{paths.socket}", token.strip(), name=host.name)


async def _run(host: Host, argv: list[str]) -> str:
    code, output = await host.run(argv, timeout_s=_COMMAND_S)
    if code != 0:
        raise UnavailableError(f"{host.name}: {argv[0]} ended with exit code {code}: {output.strip()[-500:]}")
    return output


async def _tail(host: Host, log: str) -> str:
    try:
        return (await host.run(["tail", "-n", "20", log], timeout_s=_COMMAND_S))[1]
    except DeadlineError:
        return ""
