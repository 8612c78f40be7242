"""The command line as tests use it: in this process where nothing is started, else in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from agentrl.cli.main import main

RECIPE = Path(__file__).parents[1] / "recipes" / "local.toml"


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What --json printed: one document, nothing else."""
        return json.loads(self.out)


def agentrl(*argv: str | Path) -> Done:
    """In this process: for what starts nothing."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in argv])
        except SystemExit as exc:
            code = exc.code
    return Done(code, out.getvalue(), err.getvalue())


def started(cwd: Path, *argv: str | Path) -> subprocess.Popen[str]:
    """In a process of its own, working in `cwd`."""
    command = [sys.executable, "-m", "agentrl.cli.main", *map(str, argv)]
    return subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ran(cwd: Path, *argv: str | Path, timeout_s: float = 90.0) -> Done:
    with started(cwd, *argv) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, out, err)


def until(condition: Any, *, within_s: float = 30.0) -> None:
    """Another process says nothing when it has got there, so it is asked."""
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends, "not within its time"
        time.sleep(0.02)


def left_behind(folder: Path) -> list[str]:
    """Processes that name `folder` on their command line or work in it."""
    return list(_left_behind(os.fspath(folder)))


def _left_behind(folder: str) -> Iterator[str]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if process.pid != os.getpid() and (folder in line or process.cwd().startswith(folder)):
                yield f"{process.pid} {line}"
