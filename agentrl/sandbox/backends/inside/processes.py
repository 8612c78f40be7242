"""Process trees, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time

TYPE_CHECKING = False  # importing typing would cost memory and time in every box
if TYPE_CHECKING:
    from collections.abc import Iterable

KILL_S = 5.0  # for a tree to stop, and for killed processes to be gone; longer means stuck in the kernel


def _parents() -> dict[int, tuple[int, str]]:
    """Every visible process: its parent and its state letter."""
    found: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as f:
                state, parent = f.read().rpartition(")")[2].split()[:2]
                found[int(name)] = (int(parent), state)
    return found


def descendants(root: int) -> dict[int, str]:
    """Living processes below `root`, with their state letters."""
    parents = _parents()
    below: dict[int, bool] = {root: True}

    def is_below(pid: int) -> bool:
        if pid not in below:
            below[pid] = False  # a cycle cannot happen, a race can
            below[pid] = pid in parents and is_below(parents[pid][0])
        return below[pid]

    return {pid: state for pid, (_, state) in parents.items() if pid != root and state not in "ZX" and is_below(pid)}


def kill_tree(root: int) -> int:
    """SIGKILL to everything below `root`; how many. First all are stopped, until a look finds no new one: stopped
    processes free no place under the process limit, so not even a fork bomb can keep ahead."""
    deadline = time.monotonic() + KILL_S
    while (
        moving := [p for p, state in descendants(root).items() if state not in "TtD"]
    ) and time.monotonic() < deadline:
        _signal(moving, signal.SIGSTOP)
    doomed = list(descendants(root))
    _signal(doomed, signal.SIGKILL)
    return len(doomed)


def move(root: int, cpus: list[int]) -> None:
    """Another affinity for every thread below `root`, where no cpuset holds them together."""
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), cpus)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def resident(pids: Iterable[int]) -> int:
    """Bytes of private memory that these processes hold."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as f:
            _, resident, shared = f.read().split()[:3]
            pages += int(resident) - int(shared)
    return pages * os.sysconf("SC_PAGE_SIZE")
