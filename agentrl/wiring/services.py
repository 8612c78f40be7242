"""Engines and sandbox daemons that live on after the command that started them.

    runs/.services/NAME/   one folder for each recipe name
      serve.toml  sandbox.toml    the recipe they were started with
      serve.json  sandbox.json    `Serving`: written once everything serves, gone when it was stopped
      serve.lock  sandbox.lock    held by the keeper: the kernel lets go with it, however it dies
      token  logs/

A detached keeper (`keeper.py`) holds each kind's processes and their lifeline: while the lock is held they live, and
when the keeper is gone they are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from agentrl.errors import AgentRLError, DeadlineError, UnavailableError, UserError
from agentrl.hosts.local import tail
from agentrl.ports import Progress
from agentrl.recipe import show
from agentrl.recipe.schema import Recipe
from agentrl.records import Record
from agentrl.wiring.attach import RUNS
from agentrl.wiring.derive import model_path, token_file
from agentrl.wiring.machine import check_ports

_READY_MARGIN_S = 15.0  # the keeper's own start, beyond what the recipe gives its parts
_DOWN_S = 30.0
_KILLED_S = 15.0


class Part(Record):
    """One process that a keeper holds. host: empty for this machine; elsewhere pid and log are that host's, and the url
    is an address here that reaches it while the keeper lives. served_name: what only this engine answers to; empty for
    a daemon."""

    name: str
    pid: int
    log: str
    url: str
    served_name: str = ""
    host: str = ""


class Serving(Record):
    """What runs. url of a sandbox daemon: `unix:/path/to/socket`."""

    kind: str  # serve | sandbox
    recipe: str
    pid: int  # the keeper
    started: float  # unix time
    folder: str
    token_file: str
    parts: tuple[Part, ...]


class Told(Record):
    """A line of what the keeper says on the pipe it was given. who: is at `what` now (`ports.Progress`); empty in the
    last line: that all serves, or why not."""

    serving: Serving | None = None
    message: str = ""
    hint: str = ""
    exit_code: int = 0
    who: str = ""
    what: str = ""
    share: float | None = None


class Services:
    """One kind of service of one recipe name, below `runs`. All calls block."""

    def __init__(self, kind: str, name: str, *, runs: Path = RUNS) -> None:
        self.kind = kind
        self.name = name
        self.folder = (runs / ".services" / name).absolute()
        self.recipe_file = self.folder / f"{kind}.toml"
        self.state_file = self.folder / f"{kind}.json"
        self.log = self.folder / "logs" / f"{kind}-keeper.log"

    def running(self) -> Serving | None:
        """None where no keeper lives. A keeper that is still starting counts as none: it has told nobody anything."""
        if not self.state_file.is_file() or not self._held():
            return None
        try:
            return msgspec.json.decode(self.state_file.read_bytes(), type=Serving)
        except (OSError, msgspec.MsgspecError) as exc:
            raise UnavailableError(f"{self.state_file}: cannot be read ({exc})", hint="stop the service anew") from exc

    def up(self, recipe: Recipe, *, timeout_s: float, progress: Progress | None = None) -> Serving:
        """Starts a keeper and waits until everything serves. Otherwise nothing is left, and what the keeper said is
        raised. UserError where it runs already."""
        attached = recipe.engines.attach if self.kind == "serve" else recipe.sandbox.attach
        if attached:
            section = "engines" if self.kind == "serve" else "sandbox"
            raise UserError(f"{section}.attach: the recipe uses what runs already", hint="leave it out to start some")
        if self.kind == "serve":
            model_path(recipe)
            if not recipe.hosts:
                check_ports(recipe.engines)
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            token_file(self.folder)
        except OSError as exc:
            raise UserError(f"{self.folder}: cannot be made: {exc.strerror}", hint="run it in another folder") from exc
        with self._lock() as lock:
            self.state_file.unlink(missing_ok=True)
            self.recipe_file.write_text(show.dump(recipe))
            keeper, told = self._start(lock)
        try:
            return self._wait(keeper, told, timeout_s + _READY_MARGIN_S, progress)
        except BaseException:
            _end(keeper.pid)
            raise
        finally:
            told.close()

    def down(self) -> bool:
        """Ends the keeper and all it holds; whether there was one. DeadlineError where something is left."""
        if not self._held():
            self.state_file.unlink(missing_ok=True)
            return False
        pid = self._owner()
        if pid is not None:
            _end(pid)
        if self._held():
            raise DeadlineError(f"{self.folder}: process {pid} does not end", hint=f"see {self.log}")
        for left in (self.state_file, self.recipe_file):
            left.unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        """The lock's descriptor. The keeper inherits it, so it stays locked without a gap."""
        path = self.folder / f"{self.kind}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd
        except BlockingIOError:
            raise UserError(
                f"{self.kind} of recipe {self.name} runs already (process {self._owner()})",
                hint=f"`agentrl {self.kind} status`, or `agentrl {self.kind} down` first",
            ) from None
        finally:
            os.close(fd)

    def _held(self) -> bool:
        path = self.folder / f"{self.kind}.lock"
        if not path.exists():
            return False
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _owner(self) -> int | None:
        """The keeper wrote its id into the lock it holds; a lock that nobody holds says nothing."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / f"{self.kind}.lock").read_text())
        return None

    def _start(self, lock: int) -> tuple[subprocess.Popen[bytes], _Pipe]:
        read, write = os.pipe()
        argv = [sys.executable, "-m", "agentrl.wiring.keeper", self.kind, str(self.recipe_file), str(write), str(lock)]
        try:
            with self.log.open("ab") as log:
                keeper = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(write, lock),
                    start_new_session=True,
                )
        finally:
            os.close(write)
        return keeper, _Pipe(read)

    def _wait(
        self, keeper: subprocess.Popen[bytes], told: _Pipe, timeout_s: float, progress: Progress | None
    ) -> Serving:
        for line in told.lines(timeout_s):
            if line is None:
                raise DeadlineError(f"{self.kind} was not up within {timeout_s:g} s", hint=f"see {self.log}")
            said = msgspec.json.decode(line, type=Told)
            if said.who:
                if progress is not None:
                    progress(said.who, said.what, said.share)
            elif said.serving is None:
                kinds: dict[int, type[AgentRLError]] = {2: UserError, 3: UnavailableError}
                raise kinds.get(said.exit_code, AgentRLError)(said.message, hint=said.hint)
            else:
                return said.serving
        code = keeper.wait()
        raise UnavailableError(
            f"the keeper of {self.kind} ended with code {code}; {self.log} ends:\n{tail(str(self.log))}",
            hint="mend what the log names",
        )


class _Pipe:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def lines(self, timeout_s: float) -> Iterator[bytes | None]:
        """Each as it comes, until the other end closes; None where that took too long."""
        text, ends = b"", time.monotonic() + timeout_s
        while select.select([self._fd], [], [], max(0.0, ends - time.monotonic()))[0]:
            piece = os.read(self._fd, 65_536)
            if not piece:
                return
            *whole, text = (text + piece).split(b"\n")
            yield from whole
        yield None

    def close(self) -> None:
        os.close(self._fd)


def _end(pid: int) -> None:
    """SIGTERM, and SIGKILL where that is not enough: the guards then end what it held. Returns when all are gone."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    with contextlib.ExitStack() as stack:
        ended = [fd for each in (pid, *(child.pid for child in below)) for fd in _watched(each, stack)]
        for number, patience_s in ((signal.SIGTERM, _DOWN_S), (signal.SIGKILL, _KILLED_S)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            until = time.monotonic() + patience_s
            if all(select.select([fd], [], [], max(0.0, until - time.monotonic()))[0] for fd in ended):
                return


def _watched(pid: int, stack: contextlib.ExitStack) -> list[int]:
    """A descriptor that becomes readable when the process ends; none where it has."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return []
    stack.callback(os.close, fd)
    return [fd]
