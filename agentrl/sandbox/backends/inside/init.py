"""A box's first process. It owns the box's namespaces and a socket to the daemon, forks one worker per call, reaps.

It stays outside the box's mount namespace, so that a reset can build a fresh one; workers enter it and give up their
privileges before they touch anything that the agent controls. When the daemon goes, however it goes, the socket ends,
the init exits, and the kernel kills whatever else is in the pid namespace.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

from agentrl.sandbox.backends.inside import cgroups, files, processes, supervisor, wire

TYPE_CHECKING = False  # importing typing would cost memory and time in every box
if TYPE_CHECKING:
    from collections.abc import Callable

CALL, SWEEP, RESET, CPUS, GROW = b"c", b"s", b"r", b"p", b"g"
_REQUEST_S = 5.0  # the daemon sends the request right behind the channel


class Box:
    """What the init needs of its surroundings; each backend fills it in its own way.

    enter: run by a worker, takes it into the box and drops its privileges. renew: a fresh file system, called with no
    process left and with the request that asked for it; None where the backend replaces the whole box instead.
    handles: of `cgroups.Group.handles`, None where commands take an affinity. grow: more disk, for files of the
    daemon's that must fit even if a command filled it.
    """

    def __init__(
        self,
        policy: supervisor.Policy,
        *,
        enter: Callable[[], None],
        renew: Callable[[wire.Head], None] | None,
        handles: tuple[int, int] | None,
        grow: Callable[[int], None] | None = None,
    ) -> None:
        self.policy, self.enter, self.renew, self.handles, self.grow = policy, enter, renew, handles, grow


def serve(control: socket.socket, box: Box) -> None:
    """Until the control socket ends."""
    init = _Init(control, box)
    while init.turn():
        pass


class _Init:
    def __init__(self, control: socket.socket, box: Box) -> None:
        self._control, self._box = control, box
        # Worker to its channel, to answer if it gets killed, and the count of memory kills when it began.
        self._workers: dict[int, tuple[socket.socket, int]] = {}
        self._wake, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        for fd in (control.fileno(), self._wake):
            self._poll.register(fd, select.POLLIN)

    def turn(self) -> bool:
        for fd, _ in self._poll.poll():
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            elif not self._accept():
                return False
        return True

    def _accept(self) -> bool:
        try:
            kind, fds = wire.receive_descriptors(self._control, 1)
        except ConnectionError:
            return False
        if not kind or not fds:
            return False
        channel = socket.socket(fileno=fds[0])
        if kind == CALL or (kind == CPUS and self._box.handles is None):
            self._fork_worker(channel)
        else:
            self._serve_here(kind, channel)
        return True

    def _fork_worker(self, channel: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._serve_here(CALL, channel)
            return
        if pid:
            self._workers[pid] = channel, self._box.policy.oom_kills()
            return
        try:
            signal.set_wakeup_fd(-1)
            self._control.close()
            for fd in (self._wake, self._wake_writer):
                os.close(fd)
            for other, _ in self._workers.values():
                other.close()
            _work(channel, self._box)
        except BaseException:  # a bug of ours: to the daemon's log, and the caller sees the channel end
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)

    def _serve_here(self, kind: bytes, channel: socket.socket) -> None:
        try:
            channel.settimeout(_REQUEST_S)
            request, _ = wire.receive(channel)
            answer: wire.Head = {}
            if kind == CALL:
                answer = {"error": "fork"}
            elif kind == SWEEP:
                answer = {"swept": self._sweep()}
            elif kind == RESET and self._box.renew is not None:
                self._sweep()
                self._box.renew(request)
            elif kind == CPUS and self._box.handles is not None:
                cgroups.move(self._box.handles[0], request["cpus"])
            elif kind == GROW and self._box.grow is not None:
                self._box.grow(request["bytes"])
            wire.reply(channel, answer)
        except OSError as e:
            wire.reply(channel, {"error": str(e), "errno": e.errno})
        finally:
            channel.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._workers:
                continue
            channel, oom_before = self._workers.pop(pid)
            if os.WIFSIGNALED(status):
                # Somebody inside killed the supervisor, and nobody can tell any more which processes are its command's.
                kill_all()
                oom = self._box.policy.oom_kills() > oom_before
                wire.reply(channel, wire.ended(128 + os.WTERMSIG(status), "signal", oom=oom))
            channel.close()

    def _sweep(self) -> int:
        """Whoever loses its parent becomes our child, so what is reaped here is all there was."""
        for channel, _ in self._workers.values():
            wire.reply(channel, wire.ended(137, "sweep"))
            channel.close()
        workers = set(self._workers)
        self._workers.clear()
        kill_all()
        count = 0
        with contextlib.suppress(ChildProcessError):
            while True:
                count += os.waitpid(-1, 0)[0] not in workers
        return count


def kill_all() -> None:
    """Every other process of the pid namespace at once: no fork can slip through one kill(-1)."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        processes.kill_tree(os.getpid())


def _work(channel: socket.socket, box: Box) -> None:
    try:
        channel.settimeout(_REQUEST_S)
        request, blob = wire.receive(channel)
        channel.settimeout(None)
        if request.get("cpus"):
            if box.handles is not None:
                cgroups.move(box.handles[0], request["cpus"])
            else:
                box.policy.cpus = request["cpus"]
        box.enter()
        if request["op"] == "move":
            processes.move(os.getppid(), request["cpus"])
            wire.reply(channel, {})
        elif request["op"] == "exec":
            supervisor.run(channel, request, box.policy)
        elif request["op"] == "put":
            wire.reply(channel, files.put(request["files"], blob))
        elif request["op"] == "get":
            wire.reply(channel, *files.get(request["path"], request["limit"]))
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        wire.reply(channel, {"error": str(e), "errno": getattr(e, "errno", None)})
