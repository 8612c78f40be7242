"""One container with our init in it, from its start to its removal.

The init connects to a Unix socket in a folder that only this container sees, once; the socket's name is gone then. When
the daemon dies, however it dies, that connection ends, the init exits, and the engine removes the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import DeadlineError, InfraError, TaskError, UnavailableError
from agentrl.records import Record
from agentrl.sandbox.backends.channel import call
from agentrl.sandbox.backends.dockerd import Dockerd
from agentrl.sandbox.backends.inside import cgroups, contained, init

RUN, OWNER = "agentrl.run", "agentrl.owner"  # labels: whose it is, and the process that it must not outlive
_HELLO_S = 30.0  # from the engine's word that it runs to the init's
_CONTROL_S = 30.0
_SPARE_PIDS = 8  # the init and the supervisors of running commands
_SPARE_MB = 24  # the init
COMMANDS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE", "SETFCAP")
_INITS = ("SYS_ADMIN", "SYS_CHROOT", "SETPCAP")  # it mounts, enters, and takes these from its commands

_INSIDE = Path(contained.__file__).parent
_CODE, _SHARED = f"{contained.HOME}/code", f"{contained.HOME}/shared"
_NEEDS = "import sys, json, socket, select, resource, ctypes; sys.exit(sys.version_info < (3, 9))"
_MAIN = (
    f"import sys; sys.path.insert(0, '{_CODE}'); "
    "from agentrl.sandbox.backends.inside import contained; contained.main()"
)
# The first Python in the image that will do becomes the init; its folder gets the word where there is none.
_START = f"""\
for p in python3 /usr/bin/python3 /usr/local/bin/python3 /opt/*/bin/python3; do
    "$p" -I -S -c "$0" 2>/dev/null && exec "$p" -I -S -c "$1" {_SHARED}/s
done
echo none > {_SHARED}/word
"""


class Kind(Record):
    """What is fixed when a container is made; boxes that agree in it may follow one another in one container."""

    label: str  # the run's
    image: str  # its id
    memory_mb: int
    disk_mb: int
    pids: int
    network: bool


class NoInterpreter(Exception):
    """The image has no Python that our init could run in."""


class Container:
    """Its init serves boxes in it, one after the other."""

    def __init__(self, kind: Kind, name: str, made: str, control: socket.socket, *, portable: bool) -> None:
        self.kind, self.name, self.id, self.control = kind, name, made, control
        self.portable = portable  # CPUs are moved by the engine: we may not write its control groups
        self.cpus: tuple[int, ...] = ()  # where that has put it

    async def renew(
        self, *, workdir: str = "/", env: Mapping[str, str] | None = None, cpus: Sequence[int] = ()
    ) -> None:
        """Every process and every write is gone; the next commands see these. ConnectionError where it is lost."""
        head = {"workdir": workdir, "env": dict(env or {}), "disk_mb": self.kind.disk_mb, "cpus": cpus}
        reply, _ = await call(self.control, init.RESET, head, deadline_s=_CONTROL_S)
        if "error" in reply:
            raise InfraError(f"container {self.name}: {reply['error']}")


def options(kind: Kind, *, network: str, cpus: str, guards: Sequence[str]) -> dict[str, Any]:
    """What every container of ours is held to. guards: the engine's own security options."""
    memory = f"{kind.memory_mb + kind.disk_mb + _SPARE_MB}m"  # files are on a tmpfs, so memory as well
    security = ["no-new-privileges"]
    if any("apparmor" in guard for guard in guards):
        security.append("apparmor=unconfined")  # its profile forbids every mount
    if any("selinux" in guard for guard in guards):
        security.append("label=disable")
    return {
        "auto_remove": True,
        "network_mode": network if kind.network else "none",
        "mem_limit": memory,
        "memswap_limit": memory,
        "pids_limit": kind.pids + _SPARE_PIDS,
        "cpuset_cpus": cpus,
        "cap_drop": ["ALL"],
        "security_opt": security,
        "read_only": True,
        "log_config": {"Type": "none"},
    }


async def start(
    dockerd: Dockerd, kind: Kind, *, name: str, labels: Mapping[str, str], config: Mapping[str, Any], folder: Path
) -> Container:
    """A container whose init serves. config: of `options`. folder: to be made, shared with this container and gone
    again. NoInterpreter where its image has none. Whatever is raised, nothing of it is left."""
    more = {
        "cap_add": [*COMMANDS, *_INITS],
        "tmpfs": {contained.HOME: "size=1m,mode=700"},
        "mounts": [
            _bind(_INSIDE, f"{_CODE}/{'/'.join(_INSIDE.parts[-4:])}", read_only=True),
            _bind(folder, _SHARED, read_only=False),
        ],
    }
    command = ["/bin/sh", "-c", _START, _NEEDS, _MAIN]
    await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True)
    try:
        with _listening(folder) as listener, _word(folder) as word:
            made = await launch(
                dockerd, kind.image, name=name, labels=labels, command=command, config={**config, **more}
            )
            control = await _hello(name, listener, word)
        try:
            return await _introduce(kind, name, made, control)
        except BaseException:
            control.close()
            raise
    except BaseException:
        await asyncio.shield(dockerd.remove(name))
        raise
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _bind(source: Path, target: str, *, read_only: bool) -> dict[str, Any]:
    """Not in the form with colons, which a path may hold; and the source must be there, as the engine sees it."""
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}


async def launch(
    dockerd: Dockerd,
    image: str,
    *,
    name: str,
    labels: Mapping[str, str],
    command: list[str],
    config: Mapping[str, Any],
    user: str = "0:0",
    stdin: bool = False,
) -> str:
    """Create and start; the container's id. A cancelled call returns once the engine has answered, so that the name
    can be removed."""

    def act(client: Any) -> str:
        made = client.create_container(
            image, name=name, labels=dict(labels), entrypoint=command[:1], command=command[1:], hostname="sandbox",
            user=user, stdin_open=stdin, host_config=client.create_host_config(**config),
        )["Id"]  # fmt: skip
        client.start(made)
        return str(made)

    job = asyncio.ensure_future(dockerd.call(f"start {name}", act))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])
        raise
    except InfraError as e:
        if '"/bin/sh"' not in str(e):
            raise
        raise TaskError(
            f"image {image} has no /bin/sh, and commands need a shell", hint="Build it on one that has."
        ) from e


@contextlib.contextmanager
def _listening(folder: Path) -> Iterator[socket.socket]:
    """For one connection. The kernel's limit on a socket's name is that of the way taken here, not of the folder."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(f"/proc/self/fd/{directory}/s")
        finally:
            os.close(directory)
        listener.listen(1)
        listener.setblocking(False)
        yield listener


@contextlib.contextmanager
def _word(folder: Path) -> Iterator[int]:
    """A pipe by which the start script can say that there is no init."""
    path = folder / "word"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield reader
    finally:
        os.close(reader)


async def _hello(name: str, listener: socket.socket, word: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    none = asyncio.ensure_future(_readable(word))
    accepting = asyncio.ensure_future(loop.sock_accept(listener))
    try:
        await asyncio.wait([none, accepting], timeout=_HELLO_S, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if accepting.done() and not accepting.exception():
            accepting.result()[0].close()
        raise
    finally:
        accepting.cancel()
        none.cancel()
        # both let go of their descriptors before these are closed and their numbers go to the next call, which would
        # wait for ever on a reader that was taken away
        await asyncio.gather(none, accepting, return_exceptions=True)
    if not accepting.cancelled():
        return accepting.result()[0]
    if not none.cancelled():
        raise NoInterpreter
    raise DeadlineError(
        f"container {name}: its init said nothing for {_HELLO_S:.0f} s",
        hint="Is the engine on this very machine, and not behind a container of its own? It must see our folders.",
    )


async def _readable(fd: int) -> None:
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        asyncio.get_running_loop().remove_reader(fd)


async def _introduce(kind: Kind, name: str, made: str, control: socket.socket) -> Container:
    """Hands over the control groups' descriptors, waits until the init has built its place."""
    control.setblocking(False)
    pid = struct.unpack("3i", control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    handles, portable = _handles(pid, made)
    try:
        socket.send_fds(control, [b"h"], handles)
    finally:
        for fd in handles:
            os.close(fd)
    async with asyncio.timeout(_CONTROL_S):
        answer = await asyncio.get_running_loop().sock_recv(control, 4096)
    if answer != b"ok":
        said = answer.decode(errors="replace") or "it ended at once"
        raise UnavailableError(
            f"sandbox backend docker: the init cannot make a box in a container: {said}",
            hint="It needs SYS_ADMIN in the container and overlayfs in the kernel (5.11 or newer).",
        )
    return Container(kind, name, made, control, portable=portable)


def _handles(pid: int, container: str) -> tuple[list[int], bool]:
    """Of the CPU set and of the OOM count, and False; without the first, and True, where it is not ours to write."""
    group = cgroups.of_container(f"/proc/{pid}/cgroup", container)
    if group is None:
        return [], True
    try:
        return list(group.handles()), False
    except OSError:  # not ours to write, mounted read-only, or without the cpuset controller
        with contextlib.suppress(OSError):
            return [group.oom_handle()], True
        return [], True
