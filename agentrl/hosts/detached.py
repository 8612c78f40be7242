"""Programs that live on when whoever started them goes away, for as long as a lease says. Standard library only: this
file and guard.py run on machines that have nothing of ours installed.

`main` reads one request as JSON from standard input. {"argv", "env", "folder", "log", "lease_s", "nonce"}: ends what an
earlier start under the same folder left, starts the program under a guard in a session of its own, answers {"pid",
"nonce"} or {"error", "what"}. {"folder"} alone: only ends.

The guard listens on FOLDER/socket. Who connects is told {"nonce"} and, at the end, {"code"}. A connection may say, a
line each: `renew` (the lease begins anew), `stop GRACE_S` (SIGTERM to the program's group, SIGKILL to everything after
the grace). A lease that nobody renews ends everything as `stop` does; 0 never ends. Once all is over, FOLDER/code holds
the exit code.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.hosts.guard import Guard

MARK = "AGENTRL_DETACHED"  # in the environment of all that a program starts: how leftovers are known
_GONE_GRACE_S = 5.0
_END_S = 15.0
_KEPT_S = 86_400.0


class DetachedGuard(Guard):
    """A guard whose lifeline is a lease. The program's own standard input is a pipe that ends with the guard."""

    def __init__(self, listener: socket.socket, nonce: str, lease_s: float) -> None:
        stdin, self._held = os.pipe()
        super().__init__(_GONE_GRACE_S, stdin)
        self._listener = listener
        self._nonce = nonce
        self._lease_s = lease_s
        self._expires = time.monotonic() + lease_s if lease_s else None
        self._callers: dict[int, tuple[socket.socket, bytes]] = {}  # by descriptor, with half a line

    def tell(self, news: dict[str, Any]) -> None:
        for caller, _ in self._callers.values():
            with suppress(OSError):  # gone, or it does not read: that is its affair
                caller.send(json.dumps(news).encode() + b"\n", socket.MSG_DONTWAIT)

    def _wait(self, until: float | None) -> None:
        """Until a child dies, a signal or a caller comes, the lease ends, or it is `until`."""
        moments = [moment for moment in (until, self._expires) if moment is not None]
        left = max(0.0, min(moments) - time.monotonic()) if moments else None
        ready, _, _ = select.select([self._wake, self._listener.fileno(), *self._callers], [], [], left)
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if self._listener.fileno() in ready:
            caller, _ = self._listener.accept()
            self._callers[caller.fileno()] = caller, b""
            self.tell({"nonce": self._nonce})
        for fd in ready:
            if fd in self._callers:
                self._hear(fd)
        if self._expires is not None and time.monotonic() >= self._expires:
            self._expires = None
            self._stop(self._grace_s)

    def _hear(self, fd: int) -> None:
        (caller, begun), data = self._callers[fd], b""
        with suppress(OSError):
            data = caller.recv(4096)
        if not data:
            del self._callers[fd]
            caller.close()
            return
        *lines, rest = (begun + data).split(b"\n")
        self._callers[fd] = caller, rest[:256]
        for line in lines:
            word, _, argument = line.decode(errors="replace").partition(" ")
            if word == "renew" and self._expires is not None:
                self._expires = time.monotonic() + self._lease_s
            elif word == "stop":
                self._stop(float(argument))

    def _stop(self, grace_s: float) -> None:
        os.killpg(0, signal.SIGTERM)  # our group; we ignore it ourselves
        self._kill_at = min(time.monotonic() + grace_s, self._kill_at or float("inf"))


def start(request: dict[str, Any]) -> dict[str, Any]:
    """See the module. request: argv, env, folder, log, lease_s, nonce."""
    folder, argv, nonce = Path(request["folder"]), list(request["argv"]), str(request["nonce"])
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    end(folder)
    environment = {**os.environ, **request["env"], MARK: str(folder)}
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        return {"error": "program", "what": f"{argv[0]}: no such program"}
    try:
        Path(request["log"]).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        return {"error": "log", "what": f"{request['log']}: {exc.strerror}"}
    os.environ.clear()
    os.environ.update(environment)
    listener = _listen(folder)
    ready, told = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        _become_guard(folder, argv, nonce, float(request["lease_s"]), log, listener, told)
    os.close(told)
    with os.fdopen(ready, "rb") as file:
        pid = file.read()
    os.wait()
    return {"pid": int(pid), "nonce": nonce}


def _become_guard(
    folder: Path, argv: list[str], nonce: str, lease_s: float, log: int, listener: socket.socket, told: int
) -> None:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)
    for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    guard = DetachedGuard(listener, nonce, lease_s)
    os.write(told, b"%d" % os.getpid())
    os.close(told)
    code = guard.run(argv)
    partial = folder / "code.partial"
    partial.write_text(json.dumps({"nonce": nonce, "code": code}))
    partial.replace(folder / "code")
    (folder / "socket").unlink(missing_ok=True)
    guard.tell({"code": code})
    os._exit(0)


def _listen(folder: Path) -> socket.socket:
    """By a relative name: a folder's own may be longer than the kernel takes."""
    (folder / "code").unlink(missing_ok=True)
    (folder / "socket").unlink(missing_ok=True)
    os.chdir(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen(8)
    os.chdir("/")
    return listener


def end(folder: Path) -> int:
    """Ends what was started under `folder` and what it left; how many processes had no guard any more."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as guard:
        os.chdir(folder)
        guard.settimeout(_END_S)
        guard.connect("socket")
        guard.sendall(b"stop 0\n")
        while guard.recv(4096):
            pass
    count, ends = 0, time.monotonic() + _END_S
    while (left := _marked(folder)) and time.monotonic() < ends:
        count = max(count, len(left))
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # the kernel tells nobody but a parent
    return count


def _marked(folder: Path) -> list[int]:
    mark = os.fsencode(f"{MARK}={folder}")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 (as in guard.py)
        with suppress(OSError):
            if int(name) != os.getpid() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def _prune(folder: Path) -> None:
    """Forget what ended long ago."""
    for code in folder.parent.glob("*/code"):
        with suppress(OSError):
            if time.time() - code.stat().st_mtime > _KEPT_S:
                shutil.rmtree(code.parent, ignore_errors=True)


def main() -> None:
    request = json.load(sys.stdin)
    try:
        if "argv" in request:
            _prune(Path(request["folder"]))
            said = start(request)
        else:
            said = {"ended": end(Path(request["folder"]))}
    except OSError as exc:
        said = {"error": "folder", "what": f"{exc.filename}: {exc.strerror}"}
    sys.stdout.write(json.dumps(said))
