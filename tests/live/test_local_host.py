"""LocalHost with real processes: nothing outlives whoever started it, however that one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.errors import DeadlineError, UnavailableError, UserError
from agentrl.hosts.local import LocalHost, LocalProcess, free_port, tail

pytestmark = pytest.mark.live

# Starts a child in its group and one that ignores SIGTERM; asked to, one more that left the session and one more that
# double-forked out of it; then says that it is ready.
FAMILY = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen(["sleep", "600"])
subprocess.Popen([sys.executable, "-c", stubborn])
if sys.argv[2] == "leavers":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run(["setsid", "-f", "sleep", "600"])
open(sys.argv[1], "w").write("ready")
time.sleep(600)
"""


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """A word in the environment that all descendants inherit: whoever still has it at the end has leaked."""
    yield tmp_path
    _, left = psutil.wait_procs(marked(tmp_path), timeout=5)  # a killed process needs a moment to be gone
    for process in left:
        process.kill()
    assert not left


def marked(mark: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == str(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


async def family(mark: Path, kind: str = "leavers") -> LocalProcess:
    fifo = mark / "ready"
    os.mkfifo(fifo)
    process = await LocalHost().start(
        [sys.executable, "-c", FAMILY, str(fifo), kind], log=str(mark / "log"), env={"MARK": str(mark)}
    )
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(fifo.read_text) == "ready"
    assert len(marked(mark)) == (6 if kind == "leavers" else 4)  # guard, program, children
    return process


def test_stop_takes_the_whole_family(mark: Path) -> None:
    async def scenario() -> int:
        process = await family(mark)
        await process.stop(grace_s=5.0)
        await process.stop()
        return await process.wait()

    assert asyncio.run(scenario()) == 128 + signal.SIGTERM


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(mark: Path) -> None:
    async def scenario() -> int:
        stubborn = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
        process = await LocalHost().start(
            [sys.executable, "-c", f"{stubborn}; time.sleep(600)"], log=str(mark / "log"), env={"MARK": str(mark)}
        )
        await process.stop(grace_s=0.2)
        return await process.wait()

    assert asyncio.run(scenario()) in (128 + signal.SIGKILL, 128 + signal.SIGTERM)


@pytest.mark.parametrize("victim", ["program", "guard"])
def test_when_either_is_killed_the_rest_goes_too(mark: Path, victim: str) -> None:
    async def scenario() -> int:
        # who left the session is out of reach once its guard is dead
        process = await family(mark, "leavers" if victim == "program" else "stayers")
        pid = process.pid if victim == "guard" else psutil.Process(process.pid).children()[0].pid
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            return await process.wait()

    assert asyncio.run(scenario()) == 128 + signal.SIGKILL


def test_kill_9_of_the_parent_leaves_nothing(mark: Path) -> None:
    parent = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from tests.live.test_local_host import family
        async def main():
            process = await family(Path(sys.argv[1]))
            print(process.pid, flush=True)
            await process.wait()
        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", parent, str(mark)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        guard = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    # the stubborn child is given the grace period, then killed
    guard.wait(timeout=20)
    assert not marked(mark)


def test_run(mark: Path) -> None:
    host = LocalHost()
    assert asyncio.run(host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20)) == (3, "out\nerr\n")
    assert asyncio.run(host.run(["sh", "-c", "kill -9 $$"], timeout_s=20))[0] == 128 + 9


def test_run_past_its_time(mark: Path) -> None:
    with pytest.raises(DeadlineError, match=r"not done within 0\.3 s"):
        asyncio.run(LocalHost().run(["env", f"MARK={mark}", "sleep", "600"], timeout_s=0.3))


def test_no_such_program(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no-such-program: no such program"):
        asyncio.run(LocalHost().start(["no-such-program"], log=str(tmp_path / "log")))


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="log: "):
        asyncio.run(LocalHost().start(["true"], log=str(tmp_path / "file" / "log")))


def test_output_goes_to_the_log_and_its_tail_is_shown(tmp_path: Path) -> None:
    async def scenario() -> int:
        process = await LocalHost().start(
            ["sh", "-c", "seq 100; echo $X >&2"], log=str(tmp_path / "a" / "log"), env={"X": "last"}
        )
        return await process.wait()

    assert asyncio.run(scenario()) == 0
    assert tail(str(tmp_path / "a" / "log"), 2) == "100\nlast"
    assert tail(str(tmp_path / "none")) == ""


def test_a_free_port_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
