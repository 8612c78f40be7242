"""Starts the daemon on a host, finds one that runs, removes what dead ones left."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
import tempfile
from dataclasses import dataclass

import msgspec

from agentrl.errors import DeadlineError, UnavailableError
from agentrl.ports import Host, Process
from agentrl.recipe import schema
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.client import SandboxClient
from agentrl.sandbox.daemon import SOCKET_PATH_MAX, DaemonConfig

_COMMAND_S = 10.0
_RETRY_S = 0.02
_STOP_S = 20.0  # above the daemon's own limit for closing its sandboxes
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


class RunningDaemon:
    """A daemon that serves. `host` is its client; whoever started it calls `stop` in the end."""

    def __init__(self, host: SandboxClient, process: Process, *, capacity: int, log: str) -> None:
        self.host = host
        self.process = process
        self.capacity = capacity  # live sandboxes
        self._log = log

    async def wait_ended(self) -> str:
        """Returns when the daemon has ended, with the reason in words."""
        return f"the sandbox daemon ended with exit code {await self.process.wait()}; see {self._log}"

    async def stop(self) -> None:
        """The daemon closes all its sandboxes and ends; calls still open fail as SandboxLost. Idempotent."""
        try:
            await self.process.stop(grace_s=_STOP_S)
        finally:
            await self.host.aclose()


async def start_daemon(
    host: Host, sandbox: schema.Sandbox, *, run_dir: str, label: str, python: str = sys.executable
) -> RunningDaemon:
    """Start a daemon below `run_dir` and wait until it serves. UnavailableError with the log's end where it does not
    come up within `sandbox.start_timeout_s`."""
    paths = Paths.below(run_dir)
    config = DaemonConfig(
        name=host.name,
        label=label,
        instance=secrets.token_hex(8),
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
            client = await _ready(host, paths, process, config.instance)
        return RunningDaemon(client, process, capacity=sandbox.max_live, log=paths.log)
    except BaseException as error:
        await process.stop()
        if isinstance(error, TimeoutError):
            raise UnavailableError(
                f"the sandbox daemon on {host.name} was not ready within {sandbox.start_timeout_s:g} s; {paths.log} "
                f"ends:\n{await _tail(host, paths.log)}",
                hint="Read the log; raise sandbox.start_timeout_s on a slow host.",
            ) from None
        raise


async def attach(host: Host, *, run_dir: str) -> SandboxClient:
    """A client of the daemon that a run started. UnavailableError where none left its token there."""
    paths = Paths.below(run_dir)
    token = await _run(host, ["cat", paths.token])
    return SandboxClient(f"unix:{paths.socket}", token.strip(), name=host.name)


async def gc(sandbox: schema.Sandbox, *, run_dir: str, label: str | None = None) -> int:
    """Remove what dead daemons left on this machine, of one run or of all; no daemon needed. How many sandboxes."""
    state_dir = Paths.below(run_dir).state
    backend = make_backend(sandbox, state_dir=state_dir)
    try:
        return await backend.reap(label)
    finally:
        await backend.aclose()


async def _ready(host: Host, paths: Paths, process: Process, instance: str) -> SandboxClient:
    """Waits for the daemon's socket (a host has no event for that, so it is tried) or for its end (an event)."""
    ended = asyncio.ensure_future(process.wait())
    probe = SandboxClient(f"unix:{paths.socket}", "", name=host.name)
    try:
        while not await probe.health(deadline_s=_COMMAND_S, instance=instance):
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
