"""This machine. Every program runs under a guard (guard.py), so that none outlives us, however we die."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.errors import DeadlineError, InfraError, UnavailableError, UserError

_GUARD = str(Path(__file__).with_name("guard.py"))
_GONE_GRACE_S = 5.0  # what a program is given to clean up after its starter died
_SWEEP_S = 10.0


class LocalHost:
    """`ports.Host`. Programs get the lifeline as standard input (see agentrl.lifeline); others may ignore it."""

    def __init__(self, name: str = "localhost") -> None:
        self.name = name

    async def start(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str] | None = None, label: str = ""
    ) -> LocalProcess:
        """Start without a shell, output appended to the file `log`. UnavailableError where there is no such program,
        UserError where the log cannot be written."""
        try:
            path = Path(log)
            path.parent.mkdir(parents=True, exist_ok=True)
            output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise UserError(f"{log}: {exc.strerror}", hint="the run's folder must be writable") from exc
        try:
            return await _spawn(argv, output, env, label or argv[0])
        finally:
            os.close(output)

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
        """Exit code and combined output. DeadlineError after timeout_s, with the program killed."""
        process = await _spawn(argv, subprocess.PIPE, None, argv[0])
        try:
            async with asyncio.timeout(timeout_s):
                output = await process.output()
                return await process.wait(), output
        except TimeoutError as exc:
            raise DeadlineError(f"{shlex.join(argv)}: not done within {timeout_s:g} s") from exc
        finally:
            await process.stop(grace_s=0.0)


class LocalProcess:
    """`ports.Process`: a program and its guard, in a process group of their own whose id is `pid`."""

    def __init__(self, guard: asyncio.subprocess.Process, lifeline: int, label: str) -> None:
        self.label = label
        self._guard = guard
        self._lifeline = lifeline

    @property
    def pid(self) -> int:
        return self._guard.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._guard.returncode

    async def wait(self) -> int:
        """The program's exit code, 128 + n where signal n ended it. Nothing it started is left by then."""
        code = await self._guard.wait()
        self._drop_lifeline()
        if code < 0:  # the guard itself was killed: the kernel took the program along, the group may hold more
            self._signal_group(signal.SIGKILL)
            return 128 - code
        return code

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM to the group; after grace_s SIGKILL to everything below. InfraError where even that leaves it."""
        if self._guard.returncode is None:
            self._signal_group(signal.SIGTERM)
            if not await self._ended(grace_s):
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGUSR1)
                if not await self._ended(_SWEEP_S):
                    self._signal_group(signal.SIGKILL)
                    if not await self._ended(_SWEEP_S):
                        raise InfraError(f"{self.label} (process {self.pid}) cannot be killed")
        await self.wait()

    async def output(self) -> str:
        assert self._guard.stdout is not None
        return (await self._guard.stdout.read()).decode(errors="replace")

    async def _ended(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._guard.wait()
        except TimeoutError:
            return False
        return True

    def _signal_group(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def _drop_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def __del__(self) -> None:
        self._drop_lifeline()


async def _spawn(argv: Sequence[str], output: int, env: Mapping[str, str] | None, label: str) -> LocalProcess:
    environment = {**os.environ, **(env or {})}
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        raise UnavailableError(f"{argv[0]}: no such program", hint="install it, or correct its path in the recipe")
    child_end, our_end = os.pipe()
    try:
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _GUARD, str(_GONE_GRACE_S), *argv),
            stdin=child_end,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except BaseException as exc:
        os.close(our_end)
        if isinstance(exc, OSError):
            raise UnavailableError(f"{label}: cannot be started ({exc.strerror})") from exc
        raise
    finally:
        os.close(child_end)
    return LocalProcess(guard, our_end, label)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def tail(log: str, lines: int = 20) -> str:
    """The last lines of a log, to show why a process ended. Empty where there is no log."""
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
