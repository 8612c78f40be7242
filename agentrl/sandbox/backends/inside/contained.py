"""The init of a container: pid 1 of what Docker made. It builds the box within, as `nsbox` does on a host: a
copy-on-write view of the image on a sized tmpfs. So the disk limit is the kernel's on any storage driver, and a reset
costs milliseconds and no container.

    sys.argv[1]  the daemon's listening socket, as the container sees it

Pid 1 keeps the privileges that this takes; commands get what an ordinary container of Docker's has, or less.
"""

from __future__ import annotations

import os
import socket
import sys

from agentrl.sandbox.backends.inside import cgroups, init, kernel, room, rootfs, seccomp, supervisor, wire

HOME = "/run/agentrl"  # a small tmpfs of the container's; the box does not see it
_COPIED = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")  # Docker mounts these over empty files of the image

_OURS = ("HOSTNAME", "PWD", "SHLVL", "_", "LC_CTYPE")  # set on the way here: the shell's, and Python's own


def main() -> None:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(sys.argv[1])
    _, handles = wire.receive_descriptors(control, 2)
    try:
        box = _make_box(handles)
    except OSError as e:
        control.send(str(e).encode())
        return
    control.send(b"ok")
    init.serve(control, box)


def _make_box(handles: list[int]) -> init.Box:
    """handles: of `cgroups.Group.handles`, or the second alone where the daemon may not write control groups."""
    seccomp.check()
    image, base = f"{HOME}/image", f"{HOME}/base"
    for folder in (image, base):
        os.mkdir(folder)
    kernel.mount("/", image, flags=kernel.MS_BIND)
    attributes = "trusted" if _real_root() else "user"
    template = rootfs.Template(image, base, [], attributes, turn=kernel.move_here)  # Docker's filter bars pivot_root
    inside = room.Room(template, os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
    image_workdir = os.getcwd()
    texts = {path: _text(path) for path in _COPIED}
    image_env = {name: value for name, value in os.environ.items() if name not in _OURS}
    policy = supervisor.Policy(workdir="/", env=image_env, oom=handles[-1] if handles else -1)

    pair = (handles[0], handles[1]) if len(handles) == 2 else None

    def renew(request: wire.Head) -> None:
        if pair and request["cpus"]:
            cgroups.move(pair[0], request["cpus"])
        policy.workdir, policy.env = request["workdir"] or image_workdir, image_env | request["env"]
        policy.shell = inside.renew(workdir=policy.workdir, disk_bytes=request["disk_mb"] << 20, texts=texts)

    def enter() -> None:
        inside.enter()
        seccomp.confine()

    kernel.limit_privileges()
    kernel.close_to_inspection()
    return init.Box(policy, enter=enter, renew=renew, handles=pair, grow=inside.grow)


def _real_root() -> bool:
    """Not the root of a user namespace, where overlays keep their attributes elsewhere."""
    with open("/proc/self/uid_map") as f:
        return f.read().split() == ["0", "0", "4294967295"]


def _text(path: str) -> str:
    try:
        with open(path) as f:
            return f.read()
    except OSError:
        return ""
