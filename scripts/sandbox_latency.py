"""What the daemon adds to a sandbox backend: `python scripts/sandbox_latency.py [backend]`."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import LaneCaps, Sandbox
from agentrl.records import Limits, Task, TaskId
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.backends.base import BoxSpec
from agentrl.sandbox.launch import RunningDaemon, start_daemon

RUNS = 60
COMMAND = "echo hi"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


async def timed(what: str, act: Callable[[int], Awaitable[object]], runs: int = RUNS) -> None:
    for i in range(3):
        await act(-1 - i)
    times = []
    for i in range(runs):
        began = time.perf_counter()
        await act(i)
        times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    say(
        f"{what:34s} median {statistics.median(times):6.2f}  p90 {times[int(0.9 * runs)]:6.2f}  best {times[0]:6.2f} ms"
    )


async def of_backend(backend_name: str, folder: str) -> None:
    backend = make_backend(Sandbox(backend=backend_name), state_dir=folder)
    await backend.probe()
    box = await backend.start(BoxSpec(id="direct", label="latency", limits=Limits(), trusted=True))
    try:
        await timed("backend exec", lambda i: box.exec(COMMAND, timeout_s=5, cpus=(0,)))
    finally:
        await box.kill()
        await backend.aclose()


async def of_daemon(running: RunningDaemon, folder: str) -> None:
    task = Task(id=TaskId("t"), kind="k", instruction="", root=folder, trusted=True)

    async def open_and_close(i: int) -> None:
        await (await running.host.open(task, label="x", lease_s=60, request_id=f"open{i}")).close()

    box = await running.host.open(task, label="x", lease_s=60, request_id="box")
    await timed("daemon status (HTTP alone)", lambda i: running.host.status(deadline_s=5))
    await timed("daemon exec", lambda i: box.exec(COMMAND, timeout_s=5, request_id=f"e{i}"))
    await timed("daemon open + close", open_and_close, 20)
    boxes = await asyncio.gather(
        *(running.host.open(task, label="x", lease_s=60, request_id=f"b{i}") for i in range(16))
    )
    for width in (1, 4, 16):
        began, count = time.perf_counter(), 300

        async def worker(me: int, width: int = width, count: int = count) -> None:
            for i in range(me, count, width):
                await boxes[me].exec(COMMAND, timeout_s=30, request_id=f"w{width}.{i}")

        await asyncio.gather(*(worker(i) for i in range(width)))
        say(f"daemon exec, {width:2d} at once              {count / (time.perf_counter() - began):6.0f} a second")


async def main(backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await of_backend(backend, str(Path(folder) / "direct"))
        section = Sandbox(backend=backend, lanes=LaneCaps(command=8))  # type: ignore[arg-type]
        running = await start_daemon(LocalHost(), section, run_dir=folder, label="latency")
        try:
            await of_daemon(running, folder)
        finally:
            await running.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "namespace"))
