"""Starts the daemon on a host, finds one that runs, removes what dead ones left."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from dataclasses import dataclass

import msgspec

from agentrl.errors import DeadlineError, UnavailableError
from agentrl.ports import Host, Process
from agentrl.recipe import schema
from agentrl.sandbox.client import SandboxClient
from agentrl.sandbox.daemon import SOCKET_PATH_MAX, DaemonConfig
from agentrl.sandbox.reap import Answer, Order, reap

_COMMAND_S = 10.0
_REAP_S = 120.0
_RETRY_S = 0.02
_STOP_S = 20.0  # above the daemon's own limit for closing its sandboxes


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
        """In the state folder; where that is too long a name for the kernel, in /tmp."""
        path = f"{self.state}/daemon.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
            return path
        digest = hashlib.sha256(os.fsencode(self.run_dir)).hexdigest()[:16]
        return f"/tmp/agentrl-{digest}.sock"


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
    host: Host,
    sandbox: schema.Sandbox,
    *,
    run_dir: str,
    label: str,
    process: str = "sandbox daemon",
    pooled: bool = False,
) -> RunningDaemon:
    """Start a daemon below `run_dir` and wait until it serves. label: the run, on its sandboxes. process: by which the
    host knows the daemon, unique there; a leftover is ended first. pooled: as of `DaemonConfig`. UnavailableError with
    the log's end where it does not come up within `sandbox.start_timeout_s`."""
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
        pooled=pooled,
    )
    await host.write(paths.config, msgspec.json.format(msgspec.json.encode(config)))
    argv = [host.python, "-m", "agentrl.sandbox.daemon", "--config-file", paths.config]
    started = await host.start(argv, log=paths.log, label=process)
    try:
        async with asyncio.timeout(sandbox.start_timeout_s):
            client = await _ready(host, paths, started, config.instance)
        return RunningDaemon(client, started, capacity=sandbox.max_live, log=paths.log)
    except BaseException as error:
        await started.stop()
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
    token = await _token(host, paths)
    return SandboxClient(await host.reach(f"unix:{paths.socket}"), token, name=host.name)


async def gc(sandbox: schema.Sandbox, *, run_dir: str, label: str | None = None, host: Host | None = None) -> int:
    """Remove what dead daemons left on a host (None: this machine), of one run or of all; no daemon needed. How many
    sandboxes."""
    order = Order(sandbox=sandbox, state_dir=Paths.below(run_dir).state, label=label)
    if host is None or host.local:
        return await reap(order)
    argv = [host.python, "-m", "agentrl.sandbox.reap"]
    code, said = await host.run(argv, timeout_s=_REAP_S, stdin=msgspec.json.encode(order))
    try:
        answer = msgspec.json.decode(said, type=Answer)
    except msgspec.MsgspecError:
        raise UnavailableError(f"{host.name}: the reaper ended with exit code {code}: {said.strip()[-500:]}") from None
    if answer.error:
        raise UnavailableError(f"{host.name}: {answer.error}", hint=answer.hint)
    return answer.removed


async def _ready(host: Host, paths: Paths, process: Process, instance: str) -> SandboxClient:
    """Waits for the daemon's socket (a host has no event for that, so it is tried) or for its end (an event)."""
    ended = asyncio.ensure_future(process.wait())
    endpoint = await host.reach(f"unix:{paths.socket}")
    probe = SandboxClient(endpoint, "", name=host.name)
    try:
        while not await probe.health(deadline_s=_COMMAND_S, instance=instance):
            if (await asyncio.wait([ended], timeout=_RETRY_S))[0]:
                raise UnavailableError(
                    f"the sandbox daemon on {host.name} ended with exit code {ended.result()}; {paths.log} ends:\n"
                    + await _tail(host, paths.log),
                    hint="Mend what the log names.",
                )
        token = await _token(host, paths)
    finally:
        ended.cancel()
        await probe.aclose()
    return SandboxClient(endpoint, token, name=host.name)


async def _token(host: Host, paths: Paths) -> str:
    try:
        return (await host.read(paths.token)).decode().strip()
    except FileNotFoundError:
        raise UnavailableError(
            f"{host.name}: no sandbox daemon has been below {paths.run_dir}", hint="`agentrl sandbox up` starts one"
        ) from None


async def _tail(host: Host, log: str) -> str:
    try:
        return (await host.run(["tail", "-n", "20", log], timeout_s=_COMMAND_S))[1]
    except DeadlineError:
        return ""
