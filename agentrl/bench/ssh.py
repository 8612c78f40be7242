"""What the way through SSH costs a turn: latency and CPU of bodies as large as a turn's, at a steady rate, through
`Host.reach` and without it. `agentrl bench ssh HOST`.

Wall clock; it depends on what else runs, which `busy_before` (the load average) tells. What the tunnel adds holds the
round trip of the network to HOST.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.table import Table

from agentrl.wiring.lone_host import serving_here, serving_there

_ECHO = Path(__file__).with_name("echo.py")
_WARM_UP = 50
_LIMIT_S = 30.0


def main(host: str, *, rate: float, seconds: float, body_kb: int, answer_kb: int) -> dict[str, Any]:
    """Both ways, one after the other. `latency_ms` and `cpu_ms` are of one turn; CPU is of this process alone."""
    busy = psutil.getloadavg()[0]
    direct = asyncio.run(_measure(serving_here(_ECHO), rate, seconds, body_kb, answer_kb))
    tunnel = asyncio.run(_measure(serving_there(host, _ECHO), rate, seconds, body_kb, answer_kb))
    added = {
        "p50_ms": tunnel["latency_ms"]["p50"] - direct["latency_ms"]["p50"],
        "p99_ms": tunnel["latency_ms"]["p99"] - direct["latency_ms"]["p99"],
        "cpu_ms": tunnel["cpu_ms"] - direct["cpu_ms"],
        "cores": (tunnel["cpu_ms"] - direct["cpu_ms"]) * rate / 1e3,
    }
    return {
        "bench": "ssh",
        "cpus": len(psutil.Process().cpu_affinity() or ()),
        "busy_before": busy,
        "load": {"rate": rate, "seconds": seconds, "body_kb": body_kb, "answer_kb": answer_kb},
        "direct": direct,
        "tunnel": tunnel,
        "added": added,
    }


def table(figures: dict[str, Any]) -> Table:
    drawn = Table(title="one turn", title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in ("way", "p50 ms", "p95 ms", "p99 ms", "CPU ms", "turns/s"):
        drawn.add_column(column, justify="left" if column == "way" else "right")
    for way in ("direct", "tunnel"):
        row = figures[way]
        latency = (f"{row['latency_ms'][q]:.2f}" for q in ("p50", "p95", "p99"))
        drawn.add_row(way, *latency, f"{row['cpu_ms']:.2f}", f"{row['turns_per_s']:.0f}")
    added = figures["added"]
    drawn.add_row("added", f"{added['p50_ms']:.2f}", "", f"{added['p99_ms']:.2f}", f"{added['cpu_ms']:.2f}", "")
    rate, busy = figures["load"]["rate"], figures["busy_before"]
    drawn.caption = f"{added['cores']:.2f} of a core here at {rate:g} turns/s; load average {busy:.1f}"
    return drawn


async def _measure(
    serving: AbstractAsyncContextManager[str], rate: float, seconds: float, body_kb: int, answer_kb: int
) -> dict[str, Any]:
    body, headers = b"x" * (body_kb << 10), {"X-Answer": str(answer_kb << 10)}
    limit = aiohttp.ClientTimeout(total=_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with serving as address, aiohttp.ClientSession(connector=connector, timeout=limit) as session:

        async def turn() -> float:
            began = time.perf_counter()
            async with session.post(f"http://{address}/", data=body, headers=headers) as answer:
                assert len(await answer.read()) == answer_kb << 10
            return time.perf_counter() - began

        for _ in range(_WARM_UP):
            await turn()
        count, loop = int(rate * seconds), asyncio.get_running_loop()
        cpu, began = time.process_time(), loop.time()
        async with asyncio.TaskGroup() as group:
            turns = []
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
                turns.append(group.create_task(turn()))
        took, cpu = loop.time() - began, time.process_time() - cpu
    cuts = statistics.quantiles((turn.result() * 1e3 for turn in turns), n=100)
    return {
        "latency_ms": {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]},
        "cpu_ms": cpu / count * 1e3,
        "turns_per_s": count / took,
    }
