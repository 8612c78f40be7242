"""The sandbox daemon: `python -m agentrl.sandbox.daemon --config-file F`. One per host and run.

It serves `wire` on a Unix socket (mode 0600) or on loopback TCP, to whoever shows the token. It closes all sandboxes on
SIGTERM, SIGINT, and when its starter is gone; what a killed daemon leaves behind is reaped by the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli
from aiohttp import web

from agentrl import lifeline
from agentrl.errors import AgentRLError, UnavailableError, UserError
from agentrl.recipe import schema
from agentrl.records import Lane, Record
from agentrl.sandbox import wire
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.backends.base import Backend
from agentrl.sandbox.cpusets import CpuPlan, format_cpus, one_pool, parse_cpus, plan_cpus
from agentrl.sandbox.lanes import Lanes
from agentrl.sandbox.leases import Leases
from agentrl.sandbox.topology import read_topology

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SOCKET_PATH_MAX = 100
"""The kernel takes 107 bytes; some are left for whoever appends to the name."""

_BACKLOG = 1_024

_log = logging.getLogger(__name__)


class DaemonConfig(Record):
    """Give `socket` or `port`, not both. A missing token file is written (0600, random)."""

    token_file: str
    state_dir: str
    label: str
    name: str = "local"
    instance: str = ""  # told by /health, so that a starter knows its own daemon from another at the same address
    socket: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    sandbox: schema.Sandbox = schema.Sandbox()
    hide: tuple[str, ...] = ()  # host paths no sandbox may see
    pooled: bool = False  # no lanes: every operation at once, on all CPUs; what lanes are compared with
    queue_timeout_s: float = wire.QUEUE_TIMEOUT_S
    promote_after_s: float = 10.0  # a command that runs longer moves to a free place of the package lane; 0: never
    stop_timeout_s: float = 15.0
    lifeline: bool = True  # end of file on standard input ends the daemon


def load_config(path: Path) -> DaemonConfig:
    """UserError where the file is missing, malformed or contradicts itself."""
    try:
        text = path.read_bytes()
        config = msgspec.convert(
            tomli.loads(text.decode()) if path.suffix == ".toml" else msgspec.json.decode(text), DaemonConfig
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}", hint="See DaemonConfig in agentrl/sandbox/daemon.py.") from error
    if bool(config.socket) == bool(config.port):
        raise UserError(f"{path}: give either socket or port")
    if len(os.fsencode(config.socket)) > SOCKET_PATH_MAX:
        raise UserError(
            f"{path}: socket path {config.socket!r} is too long", hint="Choose a path of at most 100 bytes."
        )
    if config.port and not _loopback(config.host):
        raise UserError(f"{path}: host {config.host!r} is not loopback", hint="Serve 127.0.0.1 and forward over SSH.")
    return config


def plan_of(sandbox: schema.Sandbox) -> CpuPlan:
    """This host's CPU plan for one recipe section."""
    return plan_cpus(read_topology(), serving=parse_cpus(sandbox.serving_cpus))


def lanes_of(config: DaemonConfig) -> Lanes:
    if not config.pooled:
        return Lanes(plan_of(config.sandbox), config.sandbox.lanes)
    uncapped = schema.LaneCaps(**dict.fromkeys(Lane, 2 * config.sandbox.max_live))
    return Lanes(one_pool(read_topology()), uncapped)


async def serve(config: DaemonConfig) -> None:
    """Run until told to stop. UnavailableError where the backend or the address is not available."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config.lifeline:
        lifeline.install(stop.set)
    token = _prepare(config)
    with _listening(config) as listener:
        backend = make_backend(config.sandbox, state_dir=config.state_dir, hide=config.hide)
        try:
            await backend.probe()
            if reaped := await backend.reap():
                _log.info("reaped %d sandboxes that dead daemons left", reaped)
            await _serve(config, backend, listener, token, stop)
        finally:
            await backend.aclose()


async def _serve(
    config: DaemonConfig, backend: Backend, listener: socket.socket, token: str, stop: asyncio.Event
) -> None:
    lanes = lanes_of(config)
    plan = lanes.plan
    for note in plan.notes:
        _log.warning("CPU plan: %s", note)
    _log.info("CPU plan: %s", ", ".join(f"{lane} {format_cpus(cpus)}" for lane, cpus in plan.lanes.items()))
    async with asyncio.TaskGroup() as tasks:
        leases = Leases(
            backend,
            lanes,
            tasks,
            label=config.label,
            max_live=config.sandbox.max_live,
            queue_timeout_s=config.queue_timeout_s,
            promote_after_s=config.promote_after_s,
        )
        runner = web.AppRunner(
            Face(config, leases, token).app(),
            handler_cancellation=True,  # a client that went away no longer wants its command
            access_log=None,
            keepalive_timeout=3_600.0,  # longer than any client's, so that it never closes under a request
            shutdown_timeout=1.0,
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        _log.info("serving %s at %s", config.label, config.socket or f"{config.host}:{config.port}")
        await stop.wait()
        try:
            async with asyncio.timeout(config.stop_timeout_s):
                await leases.stop()
                await runner.cleanup()
        except TimeoutError:
            # TaskGroup would wait for a box that does not die; the next daemon's reaper takes over
            _log.error("not all sandboxes were closed within %g s; gc removes the rest", config.stop_timeout_s)
            os._exit(1)


class Face:
    """HTTP in, `Leases` out."""

    def __init__(self, config: DaemonConfig, leases: Leases, token: str) -> None:
        self._name = config.name
        self._instance = config.instance
        self._leases = leases
        self._expected = f"Bearer {token}".encode()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=wire.MAX_BODY_BYTES, middlewares=[self._guard])
        leases = self._leases
        app.router.add_get("/health", self._health)
        app.router.add_get("/status", self._status)
        app.router.add_post("/gc", self._gc)
        app.router.add_post("/boxes", self._open)
        app.router.add_post("/boxes/{box}/exec", self._box(wire.Exec, leases.exec))
        app.router.add_post("/boxes/{box}/put", self._box(wire.Put, leases.put))
        app.router.add_post("/boxes/{box}/get", self._box(wire.Get, leases.get))
        app.router.add_post("/boxes/{box}/sweep", self._box(wire.Sweep, leases.sweep))
        app.router.add_post("/boxes/{box}/renew", self._box(wire.Renew, leases.renew))
        app.router.add_post("/boxes/{box}/close", self._box(wire.Close, leases.close))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Token first; then every failure becomes a typed answer."""
        if request.path != "/health":
            shown = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(shown, self._expected):
                return _refusal(401, wire.Failure(kind="UserError", message="wrong or missing token"))
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _refusal(error.status, wire.Failure(kind="UserError", message=f"{request.path}: {error.reason}"))
        except msgspec.MsgspecError as error:
            return _refusal(400, wire.Failure(kind="UserError", message=f"{request.path}: {error}"))
        except Exception as error:
            if not isinstance(error, (AgentRLError, OSError)):
                _log.exception("%s failed in a way it should not", request.path)
            return _refusal(*wire.failure_of(error))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text=self._instance)

    async def _status(self, request: web.Request) -> web.Response:
        body = msgspec.json.encode(self._leases.status(self._name))
        return web.Response(body=body, content_type="application/json")

    async def _gc(self, request: web.Request) -> web.Response:
        return _answer(await self._leases.reap(wire.decode(await request.read(), wire.Gc).label))

    async def _open(self, request: web.Request) -> web.Response:
        return _answer(await self._leases.open(wire.decode(await request.read(), wire.Open)))

    def _box(self, kind: type[T], act: Callable[[str, T], Awaitable[Any]]) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            body = wire.decode(await request.read(), kind)
            return _answer(await act(request.match_info["box"], body))

        return handler


def _answer(value: Any) -> web.Response:
    return web.Response(body=wire.encode(value), content_type="application/msgpack")


def _refusal(status: int, failure: wire.Failure) -> web.Response:
    return web.Response(status=status, body=wire.encode(failure), content_type="application/msgpack")


def _prepare(config: DaemonConfig) -> str:
    Path(config.state_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
    return read_token(Path(config.token_file))


def read_token(path: Path) -> str:
    """The token in `path`; a new one is written there, readable by the owner only, if the file is missing."""
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(24))
    token = path.read_text().strip()
    if not token:
        raise UserError(f"{path}: the token file is empty", hint="Delete it; the daemon writes a new one.")
    return token


@contextlib.contextmanager
def _listening(config: DaemonConfig) -> Iterator[socket.socket]:
    """The bound socket; UnavailableError where another process serves there."""
    if config.socket:
        with _unix_socket(Path(config.socket)) as listener:
            yield listener
        return
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror}", hint="Choose another port."
            ) from error
        yield listener


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # left by a daemon that was killed
            except OSError as error:
                raise UnavailableError(f"{path}: {error.strerror}", hint="Choose another socket path.") from error
            else:
                raise UnavailableError(
                    f"a sandbox daemon already serves at {path}", hint="Stop it, or choose another socket path."
                )
    with socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)  # at once: whoever finds the name must see that somebody is behind it
        except OSError as error:
            raise UnavailableError(f"cannot listen at {path}: {error.strerror}") from error
        finally:
            os.umask(mask)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _raise_file_limit() -> None:
    """Hundreds of connections and boxes need more descriptors than the customary soft limit of 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agentrl.sandbox.daemon", description=__doc__)
    parser.add_argument("--config-file", type=Path, required=True)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    _raise_file_limit()
    try:
        asyncio.run(serve(load_config(arguments.config_file)))
    except AgentRLError as error:
        sys.stderr.write(f"sandbox daemon: {error}\n" + (f"  {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
