"""One command and all its descendants.

The supervisor is forked by the box's init for one call. It is a child subreaper: a grandchild that leaves its session
and loses its parent becomes the supervisor's child, so the command's tree is whatever descends from here. It lives on
until the last background process of its command is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import time

from agentrl.sandbox.backends.inside import cgroups, kernel, processes, wire

_DRAIN_S = 0.1  # for output still in flight after the command ended, where a background child holds the pipe
_SAMPLE_S = 0.25
_DISK_SLACK = 1 << 20
_OWN_DATA = 32 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Policy:
    """How the box's limits reach one command; 0 where the kernel enforces one for the whole box.

    oom: descriptor of the control group's count of memory kills, -1 where there is none. processes: RLIMIT_NPROC, which
    counts in the box's own user namespace. memory_bytes: RLIMIT_DATA of each process, and sampled for all together.
    file_bytes: RLIMIT_FSIZE. disk_bytes, sampled_processes: sampled. cpus: affinity, where there is no cpuset.
    """

    def __init__(
        self,
        *,
        workdir: str,
        env: dict[str, str],
        shell: str = "/bin/sh",
        oom: int = -1,
        processes: int = 0,
        memory_bytes: int = 0,
        disk_bytes: int = 0,
        file_bytes: int = 0,
        sampled_processes: int = 0,
    ) -> None:
        self.workdir, self.env, self.shell, self.oom = workdir, env, shell, oom
        self.processes, self.memory_bytes, self.disk_bytes = processes, memory_bytes, disk_bytes
        self.file_bytes, self.sampled_processes = file_bytes, sampled_processes
        self.cpus: list[int] = []

    def oom_kills(self) -> int:
        return cgroups.oom_kills(self.oom) if self.oom >= 0 else 0

    @property
    def sampled(self) -> bool:
        return bool(self.memory_bytes or self.disk_bytes or self.sampled_processes)


class Output:
    """The first and last bytes of a stream, half of `limit` each; never more in memory."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()
        self._front, self._back = limit - limit // 2, limit // 2

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self._front - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail += chunk
            if len(self._tail) > self._back:
                del self._tail[: len(self._tail) - self._back]

    @property
    def parts(self) -> tuple[bytes, bytes]:
        return bytes(self._head), bytes(self._tail)


def run(channel: socket.socket, request: wire.Head, policy: Policy) -> None:
    """Runs the command, replies, stays until its background processes are gone."""
    kernel.adopt_orphans()
    wake = _wake_on_child()
    before = policy.oom_kills()
    began = time.monotonic()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        child = _spawn(request, policy, writer)
    except (OSError, ValueError) as e:  # no such folder, no shell, too long, a zero byte
        text = f"sandbox: cannot start the command: {e}\n".encode()
        wire.reply(channel, wire.ended(126, total=len(text), head=len(text)), text)
        return
    os.close(writer)
    os.set_blocking(reader, False)
    run_ = _Run(channel, child, reader, wake, Output(request["output_bytes"]), policy)
    run_.watch(began + request["timeout_s"])
    head, tail = run_.output.parts
    answer = wire.ended(
        run_.exit_code,
        run_.killed,
        oom=run_.oom or policy.oom_kills() > before,
        total=run_.output.total,
        head=len(head),
        run_s=time.monotonic() - began,
    )
    wire.reply(channel, answer, head + tail)
    channel.close()
    run_.linger()


class _Run:
    def __init__(
        self, channel: socket.socket, child: int, reader: int, wake: int, output: Output, policy: Policy
    ) -> None:
        self.exit_code: int | None = None
        self.killed = ""  # timeout | cancel | memory | processes | disk
        self.oom = False
        self.output = output
        self._child, self._reader, self._wake, self._policy = child, reader, wake, policy
        self._open = True
        # An earlier command may have filled the disk just before it was killed: only who adds to it is at fault.
        self._disk_limit = max(policy.disk_bytes, _disk_used() + _DISK_SLACK) if policy.disk_bytes else 0
        self._poll = select.poll()
        self._channel = channel.fileno()
        for fd in (reader, wake, self._channel):
            self._poll.register(fd, select.POLLIN)

    def watch(self, deadline: float) -> None:
        sample = time.monotonic() + _SAMPLE_S if self._policy.sampled else math.inf
        while self.exit_code is None:
            now = time.monotonic()
            if now >= deadline:
                self._end("timeout")
                return
            if now >= sample:
                if over := self._over_limit():
                    self.oom = over == "memory"
                    self._end(over)
                    return
                sample = now + _SAMPLE_S
            ready = dict(self._poll.poll(1000 * (min(deadline, sample) - now)))
            if self._channel in ready:  # the caller sends nothing more: this is its hang-up
                self._end("cancel")
                return
            self._service(ready)
        self._drain(time.monotonic() + _DRAIN_S)
        if self._policy.disk_bytes and _disk_used() > self._disk_limit:
            self.killed = "disk"

    def _service(self, ready: dict[int, int]) -> None:
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            self._reap()
        if self._reader in ready:
            self._read()

    def _read(self) -> bool:
        """Whether something was read."""
        try:
            chunk = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return False
        if chunk:
            self.output.add(chunk)
            return True
        self._poll.unregister(self._reader)
        os.close(self._reader)
        self._open = False
        return False

    def _drain(self, deadline: float) -> None:
        """What the command wrote is in the pipe by now; only background children can still add to it."""
        while self._open and (left := deadline - time.monotonic()) > 0:
            if not self._read() and self._open:
                self._service(dict(self._poll.poll(1000 * left)))

    def _reap(self) -> bool:
        """Whether children remain."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def _end(self, why: str) -> None:
        self.killed = why
        processes.kill_tree(os.getpid())
        deadline = time.monotonic() + processes.KILL_S
        while self._reap() and (left := deadline - time.monotonic()) > 0:
            self._service(dict(self._poll.poll(1000 * left)))
        self.exit_code = None
        self._drain(time.monotonic() + _DRAIN_S)

    def _over_limit(self) -> str:
        policy = self._policy
        tree = processes.descendants(os.getpid())
        if policy.sampled_processes and len(tree) > policy.sampled_processes:
            return "processes"
        if policy.memory_bytes and processes.resident(tree) > policy.memory_bytes:
            return "memory"
        if policy.disk_bytes and _disk_used() > self._disk_limit:
            return "disk"
        return ""

    def linger(self) -> None:
        """Background children keep a reader for their output, or the first line they print would kill them."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._channel)
        while self._reap():
            self._service(dict(self._poll.poll()))
            self.output = Output(0)


def _wake_on_child() -> int:
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _spawn(request: wire.Head, policy: Policy, output: int) -> int:
    """Our own limits, folder and affinity first, for the command to inherit: a spawn costs half of what a fork does."""
    os.chdir(request["cwd"] or policy.workdir)
    _limit(policy)
    if policy.cpus:
        os.sched_setaffinity(0, policy.cpus)
    env = {"PATH": _PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "TERM": "dumb"}
    pid = os.posix_spawn(
        policy.shell,
        [policy.shell, "-c", request["command"]],
        env | policy.env | request["env"],
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT],
    )
    # At the group's limit the kernel shall take the command and its children before us or the init.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as f:
        f.write("1000")
    return pid


def _limit(policy: Policy) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_NOFILE: (min(1024, hard), min(4096, hard))}
    if policy.processes:
        limits[resource.RLIMIT_NPROC] = (policy.processes, policy.processes)
    if policy.file_bytes:
        limits[resource.RLIMIT_FSIZE] = (policy.file_bytes, policy.file_bytes)
    if policy.memory_bytes:
        most = max(policy.memory_bytes, _OWN_DATA)  # it binds us, too; the sampler is exact
        limits[resource.RLIMIT_DATA] = (most, most)
    for which, pair in limits.items():
        resource.setrlimit(which, pair)


def _disk_used() -> int:
    usage = os.statvfs("/")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
