"""Facts about this machine, each read without changing anything."""

from __future__ import annotations

import ctypes
import getpass
import os
import socket

from agentrl.errors import AgentRLError, UnavailableError
from agentrl.hosts.local import free_port
from agentrl.ports import Host
from agentrl.recipe.schema import Engines
from agentrl.sandbox.backends.inside import cgroups as groups

__all__ = ["can_listen", "cgroups", "check_face", "check_ports", "clock", "free_port", "gpus", "user", "writable"]

_TIME_ERROR = 5  # adjtimex: the kernel's clock is not synchronised
_TIMEX_BYTES = 208


def can_listen(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_face(port: int) -> None:
    """UnavailableError where the port that the recipe names for the run's own face is taken."""
    if port and not can_listen(port):
        raise UnavailableError(
            f"telemetry.port: port {port} is taken",
            hint="end what listens there, choose another, or 0 for any free one",
        )


def check_ports(engines: Engines) -> None:
    """UnavailableError where a port that the recipe names is taken: found in a moment, not after an engine's start."""
    if engines.attach or not engines.base_port:
        return
    for index in range(engines.count):
        port = engines.base_port + index
        if not can_listen(port):
            raise UnavailableError(
                f"engines.base_port: port {port} of engine e{index} is taken",
                hint="end what listens there, choose another engines.base_port, or 0 for any free one",
            )


def user() -> str:
    if os.getuid() == 0:
        return "root"
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def cgroups() -> str:
    found = groups.detect()
    return found if isinstance(found, str) else f"control groups v{found.version}"


async def gpus(host: Host, *, timeout_s: float) -> str:
    """Names and driver, empty where there is no driver."""
    try:
        code, said = await host.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"], timeout_s=timeout_s
        )
    except AgentRLError:
        return ""
    return "; ".join(said.strip().splitlines()) if code == 0 else ""


def clock() -> str:
    """Only asks: `modes` of the request is 0."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except AttributeError:
        return "the kernel does not say whether it is synchronised"
    if state == _TIME_ERROR:
        return "not synchronised by the kernel's account; matters only to logs of several hosts side by side"
    return "synchronised"


def writable(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)
