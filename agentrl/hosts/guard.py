"""Runs one program and makes sure that nothing of it outlives whoever asked for it. Standard library only: the
interpreter runs this file by its path, before anything is installed or imported.

    python guard.py GRACE_S STDIN PROGRAM ARG...

The guard's standard input is the lifeline: a pipe whose write end the starter holds for life. End of file there means
that the starter is gone, however it died: SIGTERM to everyone below, SIGKILL after GRACE_S. SIGUSR1 means SIGKILL now.
As child subreaper the guard stays the ancestor of all that the program starts, whatever it double-forks or setsids, so
at the end it can find and kill all of it. If the guard itself is killed, the kernel kills the program. STDIN: the
descriptor that the program gets as standard input; 0: the lifeline.

Exit code: the program's; 128 + n where signal n ended it; 127 where it could not be started.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIFELINE = 0
_SWEEP_S = 5.0
_FOR_THE_PROGRAM = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # it is in our group and gets them itself


class Guard:
    def __init__(self, grace_s: float, stdin: int) -> None:
        self._grace_s = grace_s
        self._stdin = stdin
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._watched = [_LIFELINE]
        self._kill_at: float | None = None
        self._program = 0
        self._status: int | None = None
        self._wake, write = os.pipe()
        for fd in (self._wake, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.signal(signal.SIGUSR1, self._on_kill)
        for signum in _FOR_THE_PROGRAM:
            signal.signal(signum, signal.SIG_IGN)

    def run(self, argv: list[str]) -> int:
        self._start(argv)
        while self._status is None:
            self._wait(self._kill_at)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._sweep()
            self._reap()
        self._sweep()
        if os.WIFSIGNALED(self._status):
            return 128 + os.WTERMSIG(self._status)
        return os.WEXITSTATUS(self._status)

    def _start(self, argv: list[str]) -> None:
        guard = os.getpid()
        self._program = os.fork()
        if self._program:
            return
        try:
            if self._stdin:
                os.dup2(self._stdin, 0)
                os.close(self._stdin)
            signal.set_wakeup_fd(-1)
            for signum in (*_FOR_THE_PROGRAM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(signum, signal.SIG_DFL)
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == guard:  # else it died before the kernel was told
                os.execvp(argv[0], argv)
        except OSError as exc:
            os.write(2, f"{argv[0]}: {exc.strerror}\n".encode())
        finally:
            os._exit(127)

    def _on_kill(self, signum: int, frame: FrameType | None) -> None:
        self._kill_at = time.monotonic()

    def _wait(self, until: float | None) -> None:
        """Until a child dies, a signal comes, the lifeline ends, or it is `until`."""
        left = None if until is None else max(0.0, until - time.monotonic())
        ready, _, _ = select.select([self._wake, *self._watched], [], [], left)
        with suppress(BlockingIOError):
            if self._wake in ready:
                os.read(self._wake, 4096)
            if _LIFELINE in ready and not os.read(_LIFELINE, 4096):
                self._watched = []
                self._kill_at = time.monotonic() + self._grace_s
                _signal_all(signal.SIGTERM)

    def _reap(self) -> None:
        """Collect all the dead, orphans included."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._program:
                    self._status = found[1]

    def _sweep(self) -> None:
        """SIGKILL every descendant until none is left. The killed cannot fork, so each round leaves fewer."""
        ends = time.monotonic() + _SWEEP_S
        while _signal_all(signal.SIGKILL) and time.monotonic() < ends:
            self._wait(min(ends, time.monotonic() + 0.1))
            self._reap()


def _signal_all(signum: int) -> int:
    """Signal every descendant; how many could be."""
    count = 0
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
            count += 1
    return count


def _descendants(of: int) -> list[int]:
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 (pathlib would triple the start-up time)
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(name)] = int(parent)
    below = []
    for pid in parents:
        ancestor = parents[pid]
        while ancestor != of and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == of:
            below.append(pid)
    return below


if __name__ == "__main__":
    sys.exit(Guard(float(sys.argv[1]), int(sys.argv[2])).run(sys.argv[3:]))
