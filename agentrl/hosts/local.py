"""This machine. Every program runs under a guard (guard.py), so that none outlives us, however we die."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from agentrl.errors import DeadlineError, InfraError, UnavailableError, UserError

_GUARD = str(Path(__file__).with_name("guard.py"))
_GONE_GRACE_S = 5.0  # what a program is given to clean up after its starter died
_SWEEP_S = 10.0
_SLOWEST = 20e6  # bytes a second that a disk copies


class LocalHost:
    """`ports.Host`. Programs get the lifeline as standard input (see agentrl.lifeline); others may ignore it.

    home: `~/.agentrl` where it is not given.
    """

    local = True
    up = True

    def __init__(self, name: str = "localhost", *, python: str = sys.executable, home: str = "") -> None:
        self.name = name
        self.python = python
        self.home = home or str(Path("~/.agentrl").expanduser())
        self._labelled: WeakValueDictionary[tuple[str, str], LocalProcess] = WeakValueDictionary()

    async def wait_link(self, *, up: bool) -> str:
        if not up:
            await asyncio.get_running_loop().create_future()
        return "it is this machine"

    async def start(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str] | None = None, label: str = ""
    ) -> LocalProcess:
        """Start without a shell, output appended to the file `log`. A leftover of the same label and log is ended
        first; of another LocalHost there can be none, its processes end with it.

        UnavailableError where there is no such program, UserError where the log cannot be written."""
        if label and (leftover := self._labelled.get((label, log))):
            await leftover.stop()
        try:
            path = Path(log)
            path.parent.mkdir(parents=True, exist_ok=True)
            output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise UserError(f"{log}: {exc.strerror}", hint="the run's folder must be writable") from exc
        try:
            process = await _spawn(argv, output, env, label or argv[0])
        finally:
            os.close(output)
        if label:
            self._labelled[label, log] = process
        return process

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> tuple[int, str]:
        """Exit code and combined output. DeadlineError after timeout_s, with the program killed."""
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            process = await _spawn(argv, subprocess.PIPE, None, argv[0], given.fileno())
        try:
            async with asyncio.timeout(timeout_s):
                output = await process.output()
                return await process.wait(), output
        except TimeoutError as exc:
            raise DeadlineError(f"{shlex.join(argv)}: not done within {timeout_s:g} s") from exc
        finally:
            await process.stop(grace_s=0.0)

    async def write(self, path: str, data: bytes, *, mode: int = 0o600) -> None:
        await asyncio.to_thread(_replace, Path(path), data, mode)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        return await asyncio.to_thread(_head, Path(path), limit)

    async def send(
        self, source: str, path: str, *, deadline_s: float, moved: Callable[[int], None] | None = None
    ) -> None:
        """A copy: links are followed, modes and times kept. `cp` does not tell how far it is: only its end is heard."""
        target, size = Path(path), await asyncio.to_thread(_size, Path(source))
        _parents(target)
        fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            argv = ["cp", "-rL", "--preserve=mode,timestamps", "--", source, str(fresh)]
            code, said = await self.run(argv, timeout_s=deadline_s + size / _SLOWEST)
            if code:
                raise UserError(f"{source}: cannot be copied to {path}: {said.strip()}", hint="mend what cp names")
            await asyncio.to_thread(_swap_in, fresh, target)
            if moved is not None:
                moved(size)
        finally:
            await asyncio.to_thread(_remove, fresh)

    async def reach(self, address: str) -> str:
        return address

    async def free_port(self) -> int:
        return free_port()

    async def aclose(self) -> None:
        """Nothing to end: processes end with whoever holds them."""


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


async def _spawn(
    argv: Sequence[str], output: int, env: Mapping[str, str] | None, label: str, stdin: int = 0
) -> LocalProcess:
    """stdin: the program's; 0: its lifeline."""
    environment = {**os.environ, **(env or {})}
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        raise UnavailableError(f"{argv[0]}: no such program", hint="install it, or correct its path in the recipe")
    child_end, our_end = os.pipe()
    try:
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _GUARD, str(_GONE_GRACE_S), str(stdin), *argv),
            stdin=child_end,
            pass_fds=(stdin,) if stdin else (),
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


def _parents(path: Path) -> None:
    try:
        for folder in reversed(path.parents):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise UserError(f"{path.parent}: cannot be made: {exc.strerror}", hint="choose another folder") from exc


def _replace(path: Path, data: bytes, mode: int) -> None:
    _parents(path)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        fresh.replace(path)
    except OSError as exc:
        fresh.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {exc.strerror}", hint="it must be writable") from exc


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def _head(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise UserError(f"{path}: cannot be read: {exc.strerror}", hint="it must be a readable file") from exc


def _swap_in(fresh: Path, target: Path) -> None:
    """Put `fresh` in the place of `target`. A folder cannot replace one that is not empty, so that goes aside first."""
    old = fresh.with_name(f"{fresh.name}.old")
    try:
        if target.is_dir():
            target.rename(old)
        fresh.rename(target)
    except OSError as exc:
        raise UserError(f"{target}: cannot be replaced: {exc.strerror}", hint="it must be writable") from exc
    finally:
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
