"""What watching costs: a crowd of conversations with nothing that watches them, with trace, metrics and the HTTP face,
and with `agentrl top` beside it in a terminal of its own. `agentrl bench watch`.

The conversations only wait, so that what is left is the run's own work. CPU is of one core.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import sys
import tempfile
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from agentrl.errors import AgentRLError
from agentrl.wiring.crowd import Crowd, crowd

_WARM_S = 5.0  # every conversation has begun
_SCREEN = (60, 200)  # lines, columns


def main(*, attempts: int, turns_per_s: float, seconds: float) -> dict[str, Any]:
    """Figures of each arm, in the order of what it adds."""
    arms = []
    for name, watched, screen in (
        ("nothing", False, False),
        ("trace, metrics, face", True, False),
        ("top", True, True),
    ):
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            arm = _arm(Path(folder), attempts, turns_per_s, seconds, watched=watched, screen=screen)
            arms.append({"watched_by": name, **asyncio.run(arm)})
    return {"attempts": attempts, "turns_per_s": turns_per_s, "seconds": seconds, "cpus": os.cpu_count(), "arms": arms}


async def _arm(
    folder: Path, attempts: int, turns_per_s: float, seconds: float, *, watched: bool, screen: bool
) -> dict[str, Any]:
    async with crowd(folder, attempts=attempts, turns_per_s=turns_per_s, watched=watched) as made:
        driving = asyncio.ensure_future(made.drive())
        try:
            async with _top(made, folder) if screen else contextlib.nullcontext() as top:
                await asyncio.sleep(_WARM_S)
                return await _measured(made, folder, seconds, top)
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)


async def _measured(made: Crowd, folder: Path, seconds: float, top: psutil.Process | None) -> dict[str, Any]:
    stream, trace = (made.face.stream if made.face else None), folder / "trace.json"

    def counted() -> tuple[float, ...]:
        theirs = sum(top.cpu_times()[:2]) if top else 0.0
        size = trace.stat().st_size if trace.exists() else 0
        return time.perf_counter(), time.process_time(), made.turns, theirs, stream.sent_bytes if stream else 0, size

    if top is not None and not top.is_running():
        raise AgentRLError("agentrl top ended by itself", hint="try it by hand")
    made.lags.clear()
    before = counted()
    await asyncio.sleep(seconds)
    took, own, turns, theirs, sent, traced = (b - a for a, b in zip(before, counted(), strict=True))
    lags = sorted(made.lags)
    return {
        "turns_per_s": turns / took,
        "cpu": own / took,
        "lag_median_ms": 1e3 * lags[len(lags) // 2] if lags else 0.0,
        "lag_worst_ms": 1e3 * max(lags, default=0.0),
        "stream_bytes_per_s": sent / took,
        "trace_bytes_per_s": traced / took,
        "top_cpu": theirs / took if top else None,
        "status_bytes": len(msgspec.json.encode(made.face.picture())) if made.face else 0,
    }


@contextlib.asynccontextmanager
async def _top(made: Crowd, folder: Path) -> AsyncIterator[psutil.Process]:
    """`agentrl top` on a pseudo-terminal whose other end is read and thrown away."""
    (folder / "url").write_text(await made.bound)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *_SCREEN, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentrl.cli.main", "top", str(folder)),
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    loop = asyncio.get_running_loop()

    def drop() -> None:
        with contextlib.suppress(OSError):
            os.read(ours, 1 << 16)

    loop.add_reader(ours, drop)
    try:
        yield psutil.Process(process.pid)
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(10):
            await process.wait()
