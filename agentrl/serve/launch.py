"""Starting an engine on a host that is given, and knowing that it is this one which answers.

An open port proves nothing: the engine is started under a name that nobody else knows and must say that name.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from dataclasses import dataclass

from agentrl.errors import AgentRLError, DeadlineError, EngineLost, UnavailableError, UserError
from agentrl.ports import Host, Process
from agentrl.recipe.schema import Engines
from agentrl.records import EngineInfo, Version
from agentrl.serve.sglang import SGLangEngine
from agentrl.serve.staging import Folders, Here

LOOPBACK = "127.0.0.1"
PORT_ATTEMPTS = 3  # a free port may be taken between its choice and its use
SGLANG_ENV = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else /health times out while paused
    "HF_HUB_OFFLINE": "1",
}


def embedded_command(
    engines: Engines,
    model_path: str,
    port: int,
    *,
    version: Version,
    context_tokens: int,
    token_file: str,
    served_name: str,
    python: str = sys.executable,
) -> list[str]:
    """The small CPU engine. The token stays in its file."""
    return [
        *(python, "-m", "agentrl.serve.embedded"),
        *("--model-path", model_path),
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--api-key-file", token_file),
        *("--served-model-name", served_name),
        *("--weight-version", str(version)),
        *("--ranks", str(engines.ranks)),
        *("--slots", str(engines.slots)),
        *("--kv-tokens", str(engines.kv_tokens)),
        *("--threads", str(engines.threads)),
        *("--dtype", engines.dtype),
        *("--context-length", str(context_tokens)),
    ]


def sglang_command(
    engines: Engines,
    model_path: str,
    port: int,
    *,
    version: Version,
    context_tokens: int,
    config_file: str,
    served_name: str,
    python: str = "",
) -> list[str]:
    """SGLang >= 0.5.22 on one host. config_file: YAML that holds the token (`sglang_config`). `engines.args` come last,
    so they win; a CPU needs `--device cpu --attention-backend torch_native` there."""
    parallel = ["--tp-size", str(engines.ranks), "--attn-dp-size", str(engines.ranks)] if engines.ranks > 1 else []
    return [
        *(python or engines.python or sys.executable, "-m", "sglang.launch_server"),
        *("--config", config_file),
        *("--model-path", model_path),
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--served-model-name", served_name),
        *("--weight-version", str(version)),
        *("--context-length", str(context_tokens)),
        *("--max-running-requests", str(engines.slots * engines.ranks)),
        *("--max-total-tokens", str(engines.kv_tokens)),
        *("--dtype", engines.dtype),
        *parallel,
        "--skip-tokenizer-init",  # token in, token out
        "--enable-metrics",
        "--enable-metrics-for-all-schedulers",
        *engines.args,
    ]


def sglang_env(engines: Engines) -> dict[str, str]:
    """`engines.env` wins over ours."""
    return {**SGLANG_ENV, **engines.env}


def sglang_config(token: str) -> bytes:
    """SGLang takes its key from the command line, which every user of a machine can read, or from this file."""
    return json.dumps({"api-key": token}).encode()


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
    folders: Folders | None = None,
) -> tuple[SGLangEngine, EngineInfo, Process]:
    """Start engine `name` with the weights of `version` and wait until it has proved that it serves them.

    All paths are the host's. Its log is `run_dir/logs/NAME.log`. label: by which the host knows its process, unique
    there; a leftover is ended first. folders: how its later weights get there. UnavailableError with the log's tail
    where it ends, or is not ready within `engines.start_timeout_s`; then nothing of it is left. The caller closes the
    client and stops the process.
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
        label=label or name,
        folders=folders or Here(),
    )
    for attempt in range(PORT_ATTEMPTS):
        try:
            return await _start(host, launch, _fixed_port(engines, name) or await host.free_port())
        except UnavailableError as exc:
            taken = "address already in use" in str(exc).lower()
            if not taken or engines.base_port or attempt == PORT_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What one engine is to be."""

    engines: Engines
    name: str
    model_path: str
    version: Version
    context_tokens: int
    run_dir: str
    token_file: str
    token: str
    served_name: str
    python: str
    label: str
    folders: Folders

    @property
    def log(self) -> str:
        return f"{self.run_dir}/logs/{self.name}.log"

    @property
    def config_file(self) -> str:
        return f"{self.run_dir}/{self.name}.sglang.yaml"

    def command(self, port: int) -> tuple[list[str], dict[str, str]]:
        """argv and environment."""
        if self.engines.kind == "embedded":
            argv = embedded_command(
                self.engines,
                self.model_path,
                port,
                version=self.version,
                context_tokens=self.context_tokens,
                token_file=self.token_file,
                served_name=self.served_name,
                python=self.python,
            )
            return argv, {}
        argv = sglang_command(
            self.engines,
            self.model_path,
            port,
            version=self.version,
            context_tokens=self.context_tokens,
            config_file=self.config_file,
            served_name=self.served_name,
            python=self.engines.python or self.python,
        )
        return argv, sglang_env(self.engines)


async def _start(host: Host, launch: _Launch, port: int) -> tuple[SGLangEngine, EngineInfo, Process]:
    argv, env = launch.command(port)
    if launch.engines.kind == "sglang":
        await host.write(launch.config_file, sglang_config(launch.token))
    process = await host.start(argv, log=launch.log, env=env, label=launch.label)
    url = f"http://{await host.reach(f'{LOOPBACK}:{port}')}"
    engine = _client(launch.name, url, launch.token, launch.engines, folders=launch.folders)
    try:
        return engine, await _prove(engine, process, launch), process
    except BaseException as exc:
        await engine.aclose()
        await process.stop()
        if isinstance(exc, AgentRLError):
            tail = await _tail(host, launch.log)
            message = f"engine {launch.name} did not start: {exc}\n{tail}"
            raise UnavailableError(message, hint=f"See {launch.log} on {host.name}.") from exc
        raise


async def attach_engine(
    name: str, url: str, token: str, engines: Engines, *, namespace: str = "", folders: Folders | None = None
) -> tuple[SGLangEngine, EngineInfo]:
    """An engine that somebody else started and stops. UnavailableError where it does not serve."""
    engine = _client(name, url, token, engines, namespace, folders)
    try:
        return engine, await engine.info(deadline_s=engines.admin_timeout_s)
    except BaseException as exc:
        await engine.aclose()
        if isinstance(exc, AgentRLError):
            raise UnavailableError(f"engine {name} cannot be attached: {exc}", hint="Is it running?") from exc
        raise


def _client(
    name: str, url: str, token: str, engines: Engines, namespace: str = "", folders: Folders | None = None
) -> SGLangEngine:
    return SGLangEngine(
        name,
        url,
        token,
        request_timeout_s=engines.request_timeout_s,
        admin_timeout_s=engines.admin_timeout_s,
        namespace=namespace,
        folders=folders,
    )


async def _prove(engine: SGLangEngine, process: Process, launch: _Launch) -> EngineInfo:
    """Wait for readiness or the process's end, whichever comes first; then ask who answers."""
    ended = asyncio.ensure_future(process.wait())
    serving = asyncio.ensure_future(_until_ready(engine))
    try:
        limit_s = launch.engines.start_timeout_s
        await asyncio.wait({ended, serving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise UnavailableError(f"its process ended with code {ended.result()}")
        if not serving.done():
            raise DeadlineError(f"not ready within {limit_s:g} s")
    finally:
        for task in (ended, serving):
            task.cancel()
        await asyncio.gather(ended, serving, return_exceptions=True)
    server = await engine.server_info(deadline_s=10)
    if server.served_model_name != launch.served_name:
        raise UnavailableError(f"{engine.url} is answered by another server ({server.served_model_name!r})")
    info = await engine.info(deadline_s=10)
    if info.version != launch.version:
        raise UnavailableError(f"it holds version {info.version}, not {launch.version}")
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
