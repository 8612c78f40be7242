"""Starts boxes. A small process of its own, pid 1 of a pid namespace that holds all its boxes: when it dies, they die.

    daemon -- (exec) -- janitor -- (fork) -- launcher, pid 1 -- (fork) -- init of a box, pid 1 of the box -- workers

The janitor waits outside and removes the control groups that are left when the launcher ends. The launcher ends
when its socket to the daemon does. Without root it works in one user namespace for all, and each box gets a further
one for its commands, which makes RLIMIT_NPROC count per box.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys

from agentrl.sandbox.backends.inside import cgroups, kernel, nsbox, wire
from agentrl.sandbox.backends.inside.rootfs import Template

START, KILL = b"b", b"k"
SETTINGS = "AGENTRL_LAUNCHER"
_REQUEST_S = 5.0


class Settings:
    """From the daemon, once, as JSON in the environment: arguments could be read by every box, in its /proc/1."""

    def __init__(self, root: str, base: str, hide: list[str], cgroups: bool) -> None:
        self.root, self.base, self.hide, self.cgroups = root, base, hide, cgroups


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = Settings(**json.loads(os.environ[SETTINGS]))
    groups = cgroups.detect() if settings.cgroups else "not asked for"
    uid, gid = os.getuid(), os.getgid()
    try:
        if uid != 0:
            kernel.unshare(kernel.CLONE_NEWUSER)
            kernel.map_self_to_root(uid, gid)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    except OSError as e:
        control.send(str(e).encode())
        return
    owner = f"{os.getpid()}-{cgroups.start_time(os.getpid())}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the daemon, which closes us in order
    pid = os.fork()
    if pid == 0:
        try:
            kernel.die_with_parent(signal.SIGKILL)
            template = Template(settings.root, settings.base, settings.hide, "trusted" if uid == 0 else "user")
            launcher = Launcher(control, template, None if isinstance(groups, str) else groups, owner, uid != 0)
            control.send(b"ok")
            launcher.serve()
        except OSError as e:
            control.send(str(e).encode())
        finally:
            os._exit(0)
    control.close()
    os.waitpid(pid, 0)
    if not isinstance(groups, str):
        groups.reap(None, ended=owner)


class Launcher:
    def __init__(
        self, control: socket.socket, template: Template, groups: cgroups.Cgroups | None, owner: str, user: bool
    ) -> None:
        self._control, self._template, self._cgroups, self._owner, self._user = control, template, groups, owner, user
        self._pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._boxes: dict[str, int] = {}
        self._groups: dict[int, cgroups.Group] = {}
        self._killing: dict[int, socket.socket] = {}
        self._wake, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.freeze()  # shared pages stay shared in every fork

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                elif not self._accept():
                    return

    def _accept(self) -> bool:
        try:
            kind, fds = wire.receive_descriptors(self._control, 2)
        except ConnectionError:
            return False
        if not kind:
            return False
        channel = socket.socket(fileno=fds[0])
        try:
            channel.settimeout(_REQUEST_S)
            request, _ = wire.receive(channel)
            if kind == START:
                self._start(request, channel, socket.socket(fileno=fds[1]))
            else:
                self._kill(request["id"], channel)
        except OSError as e:
            wire.reply(channel, {"error": str(e), "errno": e.errno})
        return True

    def _start(self, spec: wire.Head, channel: socket.socket, control: socket.socket) -> None:
        group = self._cgroups.group(spec["label"], spec["id"], self._owner) if self._cgroups else None
        pid = self._fork_first()
        if pid:
            self._boxes[spec["id"]] = pid
            if group:
                self._groups[pid] = group
            channel.close()
            control.close()
            return
        try:
            self._forget()
            nsbox.run(spec, channel, control, self._template, group, self._home, self._user)
        except BaseException:  # a bug of ours: to the daemon's log, and the caller sees its sockets end
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)

    def _fork_first(self) -> int:
        """Forks the first process of a new pid namespace; our later children go into our own again."""
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                kernel.setns(self._pids, kernel.CLONE_NEWPID)
        return pid

    def _forget(self) -> None:
        """In a new box: nothing of the launcher's stays open."""
        signal.set_wakeup_fd(-1)
        self._control.close()
        for fd in (self._pids, self._wake, self._wake_writer):
            os.close(fd)
        for channel in self._killing.values():
            channel.close()

    def _kill(self, box: str, channel: socket.socket) -> None:
        pid = self._boxes.get(box)
        if pid is None:
            wire.reply(channel, {})
            channel.close()
            return
        self._killing[pid] = channel
        os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """An init is reaped only after all else in its pid namespace is gone, so its groups are empty by now."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._boxes = {box: p for box, p in self._boxes.items() if p != pid}
            if group := self._groups.pop(pid, None):
                group.remove()
            if channel := self._killing.pop(pid, None):
                wire.reply(channel, {})
                channel.close()
