"""A machine behind SSH, and this one, without a run around them, for benches."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from agentrl.errors import DeadlineError, UnavailableError
from agentrl.hosts.inventory import open_host
from agentrl.hosts.local import LocalHost
from agentrl.ports import Host
from agentrl.recipe.schema import HostSpec

_READY_S = 20.0


@contextlib.asynccontextmanager
async def serving_here(program: Path) -> AsyncIterator[str]:
    """`program` (a Python file that takes its port) on this machine; its address."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        async with _serving(LocalHost(home=folder), sys.executable, program) as address:
            yield address


@contextlib.asynccontextmanager
async def serving_there(name: str, program: Path) -> AsyncIterator[str]:
    """The same on a machine that ssh calls `name`; the address here that reaches it. Nothing is left there."""
    host = await open_host(HostSpec(name=name))
    try:
        async with _serving(host, "python3", program) as address:
            yield address
    finally:
        await host.aclose()


@contextlib.asynccontextmanager
async def _serving(host: Host, python: str, program: Path) -> AsyncIterator[str]:
    folder = f"{host.home}/bench"
    await host.write(f"{folder}/{program.name}", await asyncio.to_thread(program.read_bytes))
    port = await host.free_port()
    argv = [python, "-I", "-S", f"{folder}/{program.name}", str(port)]
    process = await host.start(argv, log=f"{folder}/log", label="bench")
    try:
        address = await host.reach(f"127.0.0.1:{port}")
        await _ready(host, python, address, port)
        yield address
    finally:
        await process.stop()
        await host.run(["rm", "-rf", "--", folder], timeout_s=_READY_S)


async def _ready(host: Host, python: str, address: str, port: int) -> None:
    """Asked on that machine, since a forward always listens."""
    probe = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5).close()"
    for _ in range(100):
        with contextlib.suppress(DeadlineError):
            if (await host.run([python, "-I", "-S", "-c", probe], timeout_s=_READY_S))[0] == 0:
                return
        await asyncio.sleep(0.05)
    raise UnavailableError(f"host {host.name}: nothing listens at {address}")
