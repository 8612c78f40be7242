"""How fast sandboxes are on this machine: of the backend alone, and through the daemon with its lanes and its HTTP.
`agentrl bench sandbox`.

Wall clock; it depends on what else runs, which `busy_before` (the load average) tells.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from agentrl.recipe.schema import Recipe
from agentrl.records import File, Task, TaskId
from agentrl.wiring.lone_daemon import lone_daemon, measure_backend

CALLERS = 8  # commands in flight at once
EXECS = 25  # of each caller
LEASE_S = 300.0

DEFAULT = Recipe(name="bench-sandbox")


def main(recipe: Recipe | None = None, *, json_file: str = "", repeats: int = 20, many: int = 64) -> dict[str, Any]:
    """Measure the recipe's backend (default: namespace) and a daemon over it; writes JSON where asked."""
    recipe = recipe or DEFAULT
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        busy = psutil.getloadavg()[0]
        backend = asyncio.run(measure_backend(recipe, Path(folder), repeats=repeats, many=many))
        daemon = asyncio.run(measure_daemon(recipe, Path(folder), repeats=repeats))
    figures = {
        "bench": "sandbox",
        "cpus": len(psutil.Process().cpu_affinity() or ()),
        "busy_before": busy,
        "backend": msgspec.to_builtins(backend),
        "daemon": daemon,
    }
    if json_file:
        Path(json_file).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


async def measure_daemon(recipe: Recipe, folder: Path, *, repeats: int) -> dict[str, Any]:
    """Latencies in ms of single calls one after the other, and commands a second with 8 callers, one sandbox each."""
    task = Task(id=TaskId("bench"), kind="bench", instruction="", root="", trusted=True)
    async with lone_daemon(recipe, folder) as daemon:
        opened: list[float] = []
        closed: list[float] = []
        for _ in range(repeats):
            began = time.perf_counter()
            box = await daemon.open(task, label="bench", lease_s=LEASE_S, request_id=uuid.uuid4().hex)
            opened.append(time.perf_counter() - began)
            closed.append(await _timed(box.close))
        boxes = [
            await daemon.open(task, label="bench", lease_s=LEASE_S, request_id=uuid.uuid4().hex) for _ in range(CALLERS)
        ]

        async def run(index: int) -> None:
            await boxes[index].exec("echo hi", timeout_s=20.0, request_id=uuid.uuid4().hex)

        async def put() -> None:
            await boxes[0].put({"/work/file": File(data=b"x" * 4096)}, request_id=uuid.uuid4().hex)

        async def caller(index: int) -> None:
            for _ in range(EXECS):
                await run(index)

        execs = [await _timed(lambda: run(0)) for _ in range(repeats)]
        puts = [await _timed(put) for _ in range(repeats)]
        together = await _timed(lambda: _all([caller(index) for index in range(CALLERS)]))
        await _all([box.close() for box in boxes])
    return {
        "open": _latency(opened),
        "exec": _latency(execs),
        "put": _latency(puts),
        "close": _latency(closed),
        "callers": CALLERS,
        "execs_per_s": round(CALLERS * EXECS / together, 1),
    }


async def _all(work: list[Awaitable[None]]) -> None:
    await asyncio.gather(*work)


async def _timed(call: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


def _latency(seconds: list[float]) -> dict[str, float]:
    ms = sorted(1e3 * s for s in seconds)
    figures = {"median": statistics.median(ms), "p90": ms[int(0.9 * (len(ms) - 1))], "best": ms[0]}
    return {name: round(value, 2) for name, value in figures.items()}
