"""Starting an engine on a host that is given, and knowing that it is this one which answers.

An open port proves nothing: the engine is started under a name that nobody else knows and must say that name.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from agentrl.errors import AgentRLError, DeadlineError, EngineLost, UnavailableError, UserError
from agentrl.ports import Host, Process, Progress
from agentrl.recipe.schema import Engines
from agentrl.records import EngineInfo, Version
from agentrl.serve.broadcast import Broadcast, Sender
from agentrl.serve.command import LOOPBACK, Command, sglang_config
from agentrl.serve.sglang import SGLangEngine
from agentrl.serve.staging import Folders, Here
from agentrl.serve.startup import follow, require_sglang, silent

PORT_ATTEMPTS = 3  # a free port may be taken between its choice and its use


async def start_engine(
    host: Host,
    engines: Engines,
    *,
    name: str,
    model_path: str,
    version: Version,
    context_tokens: int,
    run_dir: str,
    token_file: str,
    label: str = "",
    first_gpu: int = 0,
    folders: Folders | None = None,
    sender: Sender | None = None,
    progress: Progress = silent,
) -> tuple[SGLangEngine, EngineInfo, Process]:
    """Start engine `name` with the weights of `version` and wait until it has proved that it serves them.

    All paths are the host's. Its log is `run_dir/logs/NAME.log`. label: by which the host knows its process, unique
    there; a leftover is ended first. first_gpu: the lowest of its GPUs there. folders: how its later weights get there;
    sender: they are broadcast by it instead. UnavailableError with the log's tail where it ends, or is not ready within
    `engines.start_timeout_s`; then nothing of it is left. The caller closes the client and stops the process.
    """
    launch = _Launch(
        engines=engines,
        name=name,
        model_path=model_path,
        version=version,
        context_tokens=context_tokens,
        run_dir=run_dir,
        token_file=token_file,
        token=await _token(host, token_file),
        served_name=f"agentrl-{name}-{secrets.token_hex(8)}",
        python=host.python,
        first_gpu=first_gpu,
        label=label or name,
        folders=folders or Here(),
        sender=sender,
        progress=progress,
    )
    if engines.kind == "sglang":
        await require_sglang(host, launch.interpreter)
    for attempt in range(PORT_ATTEMPTS):
        try:
            return await _start(host, launch, _fixed_port(engines, name) or await host.free_port())
        except UnavailableError as exc:
            taken = "address already in use" in str(exc).lower()
            if not taken or engines.base_port or attempt == PORT_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


@dataclass(frozen=True, kw_only=True)
class _Launch(Command):
    """And how it is started and reached."""

    token: str
    label: str
    folders: Folders
    sender: Sender | None
    progress: Progress


async def _start(host: Host, launch: _Launch, port: int) -> tuple[SGLangEngine, EngineInfo, Process]:
    if launch.engines.kind == "sglang":
        await host.write(launch.config_file, sglang_config(launch.token))
    process = await host.start(launch.argv(port), log=launch.log, env=launch.env, label=launch.label)
    url = f"http://{await host.reach(f'{LOOPBACK}:{port}')}"
    engine = _client(launch.name, url, launch.token, launch.engines, folders=launch.folders, sender=launch.sender)
    try:
        return engine, await _prove(host, engine, process, launch), process
    except BaseException as exc:
        await engine.aclose()
        await process.stop()
        if isinstance(exc, AgentRLError):
            tail = await _tail(host, launch.log)
            message = f"engine {launch.name} did not start: {exc}\n{tail}"
            raise UnavailableError(message, hint=f"See {launch.log} on {host.name}.") from exc
        raise


async def attach_engine(
    name: str,
    url: str,
    token: str,
    engines: Engines,
    *,
    namespace: str = "",
    folders: Folders | None = None,
    sender: Sender | None = None,
) -> tuple[SGLangEngine, EngineInfo]:
    """An engine that somebody else started and stops. UnavailableError where it does not serve."""
    engine = _client(name, url, token, engines, namespace, folders, sender)
    try:
        return engine, await engine.info(deadline_s=engines.admin_timeout_s)
    except BaseException as exc:
        await engine.aclose()
        if isinstance(exc, AgentRLError):
            raise UnavailableError(f"engine {name} cannot be attached: {exc}", hint="Is it running?") from exc
        raise


def _client(
    name: str,
    url: str,
    token: str,
    engines: Engines,
    namespace: str = "",
    folders: Folders | None = None,
    sender: Sender | None = None,
) -> SGLangEngine:
    return SGLangEngine(
        name,
        url,
        token,
        request_timeout_s=engines.request_timeout_s,
        admin_timeout_s=engines.admin_timeout_s,
        namespace=namespace,
        folders=folders,
        broadcast=None if sender is None else Broadcast(sender),
    )


async def _prove(host: Host, engine: SGLangEngine, process: Process, launch: _Launch) -> EngineInfo:
    """Wait for readiness or the process's end, whichever comes first; then ask who answers."""
    ended = asyncio.ensure_future(process.wait())
    serving = asyncio.ensure_future(_until_ready(engine))
    who = f"{launch.name} on {host.name}"
    watching = asyncio.ensure_future(follow(host, launch.log, who, launch.progress))
    try:
        limit_s = launch.engines.start_timeout_s
        await asyncio.wait({ended, serving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise UnavailableError(f"its process ended with code {ended.result()}")
        if not serving.done():
            raise DeadlineError(f"not ready within {limit_s:g} s")
    finally:
        for task in (ended, serving, watching):
            task.cancel()
        await asyncio.gather(ended, serving, watching, return_exceptions=True)
    server = await engine.server_info(deadline_s=10)
    if server.served_model_name != launch.served_name:
        raise UnavailableError(f"{engine.url} is answered by another server ({server.served_model_name!r})")
    info = await engine.info(deadline_s=10)
    if info.version != launch.version:
        raise UnavailableError(f"it holds version {info.version}, not {launch.version}")
    launch.progress(who, f"serves version {info.version}", 1.0)
    return info


async def _until_ready(engine: SGLangEngine) -> None:
    """Ends when it serves. There is no event to wait for across processes, so it asks, ever less often."""
    pause_s = 0.05
    while True:
        try:
            if await engine.ready(deadline_s=5):
                return
        except (EngineLost, DeadlineError):
            pass  # not listening yet
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


async def _tail(host: Host, log: str) -> str:
    try:
        return (await host.run(["tail", "-n", "20", log], timeout_s=5))[1]
    except AgentRLError:
        return ""


async def _token(host: Host, token_file: str) -> str:
    try:
        return (await host.read(token_file)).decode().strip()
    except FileNotFoundError as exc:
        raise UserError(f"{token_file}: no such file", hint="The engines' token must be in this file.") from exc


def _fixed_port(engines: Engines, name: str) -> int:
    """base_port + the number at the end of the engine's name; 0: any that is free."""
    digits = name[len(name.rstrip("0123456789")) :]
    return engines.base_port and engines.base_port + int(digits or 0)
