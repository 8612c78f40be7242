"""Starts a program of `inside/` with a socket to it: isolated mode, the standard library and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import agentrl

PACKAGE = Path(agentrl.__file__).resolve().parents[1]
_CODE = (
    "import os, sys, importlib; sys.path.insert(0, os.environ['AGENTRL_PACKAGE']); "
    "importlib.import_module(os.environ['AGENTRL_MAIN']).main()"
)


async def spawn(
    interpreter: Sequence[str],
    module: str,
    env: Mapping[str, str],
    *,
    package: str = str(PACKAGE),
    fds: Sequence[int] = (),
) -> tuple[socket.socket, asyncio.subprocess.Process]:
    """`interpreter` runs `module.main()`, its socket's number in argv[1]. Everything else goes through the environment,
    which no box can read. Returns our end, non-blocking; the program ends when it is closed."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setblocking(False)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *interpreter, "-I", "-S", "-c", _CODE, str(theirs.fileno()),
            env={"AGENTRL_PACKAGE": package, "AGENTRL_MAIN": module, **env},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *fds], start_new_session=True, cwd="/",
        )  # fmt: skip
    return mine, process
