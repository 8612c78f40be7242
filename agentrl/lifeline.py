"""A daemon of ours must not outlive whoever started it, and must still be able to clean up.

The starter hands the child a pipe as standard input and keeps the write end for life. End of file there means that the
starter is gone, however it died. `install` also asks the kernel for SIGTERM at the parent's death, for a child that is
stuck away from its event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def install(on_death: Callable[[], None]) -> None:
    """Call from the child's running event loop. `on_death` runs once, on the loop, when the starter is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()
    os.set_blocking(fd, False)

    def readable() -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        if not data:
            loop.remove_reader(fd)
            on_death()

    loop.add_reader(fd, readable)
