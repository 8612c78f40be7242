"""Figures of one backend on this machine: `python -m agentrl.sandbox.backends.measure [BACKEND [BOXES [IMAGE]]]`.

Wall clock as the daemon sees it, from the call to its answer. Say beside a figure what else the machine was doing.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from agentrl.recipe import schema
from agentrl.records import Limits, Record
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.backends.base import Backend, Box, BoxSpec
from agentrl.sandbox.backends.inside import processes


class Latency(Record):
    """Milliseconds of single calls, one after the other."""

    median: float
    p90: float
    best: float


class Figures(Record):
    backend: str
    isolation: str
    start: Latency
    exec: Latency  # `echo hi`
    exec_program: Latency  # `/bin/true`, a program to load beside the shell
    put: Latency  # 4 kB
    reset: Latency  # after 20 MB in 20 files were written
    kill: Latency
    many: int  # boxes alive at once in what follows
    many_start_per_s: float
    many_exec_per_s: float
    pss_mb_per_box: float  # idle; the launcher's share included; NaN where it cannot be read, or an engine runs them
    many_kill_s: float


async def measure(backend: Backend, *, repeats: int = 20, many: int = 256, callers: int = 8) -> Figures:
    """Starts boxes of `backend`, which the caller has probed and closes. callers: commands in flight at once."""
    starts, kills = [], []
    for n in range(repeats + 3):
        began = time.perf_counter()
        box = await backend.start(_spec(f"start{n}"))
        starts.append(time.perf_counter() - began)
        kills.append(await _timed(box.kill))
    box = await backend.start(_spec("one"))
    execs = [await _timed(lambda: _run(box, "echo hi")) for _ in range(repeats + 3)]
    programs = [await _timed(lambda: _run(box, "/bin/true; exit")) for _ in range(repeats + 3)]
    puts = [await _timed(lambda: _put(box)) for _ in range(repeats + 3)]
    resets = []
    for _ in range(repeats // 2 + 3):
        await _run(box, "for i in $(seq 20); do head -c 1048576 /dev/zero > /work/$i; done")
        resets.append(await _timed(box.reset))
    await box.kill()
    crowd = await _crowd(backend, many, callers)
    return Figures(
        backend=backend.name,
        isolation=backend.isolation,
        start=_latency(starts),
        exec=_latency(execs),
        exec_program=_latency(programs),
        put=_latency(puts),
        reset=_latency(resets),
        kill=_latency(kills),
        many=many,
        **crowd,
    )


async def _crowd(backend: Backend, many: int, callers: int) -> dict[str, float]:
    began = time.perf_counter()
    boxes = [await backend.start(_spec(f"many{n}")) for n in range(many)]
    started = time.perf_counter()
    pss = _pss_mb() / many
    measured = time.perf_counter()

    async def call(first: int) -> None:
        for box in boxes[first::callers]:
            await _run(box, "echo hi")

    async with asyncio.TaskGroup() as group:
        for first in range(callers):
            group.create_task(call(first))
    ran = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for box in boxes:
            group.create_task(box.kill())
    return {
        "many_start_per_s": many / (started - began),
        "many_exec_per_s": many / (ran - measured),
        "pss_mb_per_box": pss,
        "many_kill_s": time.perf_counter() - ran,
    }


def _spec(name: str) -> BoxSpec:
    return BoxSpec(id=f"{name}-{os.getpid()}", label="measure", limits=Limits(), trusted=True)


async def _run(box: Box, command: str) -> None:
    result = await box.exec(command, timeout_s=30, cpus=())
    assert result.exit_code == 0, result


async def _put(box: Box) -> None:
    from agentrl.records import File

    await box.put({"/work/file": File(data=bytes(4096))})


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


def _latency(seconds: list[float]) -> Latency:
    """The first three are warm-up."""
    ms = sorted(1000 * s for s in seconds[3:])
    return Latency(median=statistics.median(ms), p90=ms[int(0.9 * (len(ms) - 1))], best=ms[0])


def _pss_mb() -> float:
    """Proportional share of memory of everything this process started."""
    below = processes.descendants(os.getpid())
    kilobytes = 0
    for pid in below:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except PermissionError:
            return math.nan
        kilobytes += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return kilobytes / 1024 if below else math.nan


def table(figures: Figures) -> str:
    lines = [f"backend {figures.backend}: {figures.isolation}", "", f"{'ms':14}{'median':>9}{'p90':>9}{'best':>9}"]
    for name in ("start", "exec", "exec_program", "put", "reset", "kill"):
        latency: Latency = getattr(figures, name)
        lines.append(f"{name:14}{latency.median:9.1f}{latency.p90:9.1f}{latency.best:9.1f}")
    lines += [
        "",
        f"{figures.many} boxes: {figures.many_start_per_s:.0f} starts/s, {figures.many_exec_per_s:.0f} execs/s, "
        f"{figures.pss_mb_per_box:.2f} MB PSS each, all killed in {figures.many_kill_s:.2f} s",
    ]
    return "\n".join(lines) + "\n"


async def _main(name: str = "namespace", many: str = "256", image: str = "") -> None:
    sandbox = msgspec.convert({"backend": name, "image": image}, schema.Sandbox)
    with tempfile.TemporaryDirectory(prefix="agentrl-measure-") as state:
        backend = make_backend(sandbox, state_dir=state)
        await backend.probe()
        try:
            sys.stdout.write(table(await measure(backend, many=int(many))))
        finally:
            await backend.aclose()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
