"""From a forked process to a box: control groups, namespaces, the file system, then its init."""

from __future__ import annotations

import os
import socket

from agentrl.sandbox.backends.inside import cgroups, init, kernel, rootfs, supervisor, wire
from agentrl.sandbox.backends.inside.room import Room


def run(
    spec: wire.Head,
    channel: socket.socket,
    control: socket.socket,
    template: rootfs.Template,
    group: cgroups.Group | None,
    home: int,
    user: bool,
) -> None:
    try:
        if group:
            group.make(memory_bytes=(spec["memory_mb"] + spec["disk_mb"]) << 20, pids=spec["pids"], cpus=spec["cpus"])
            group.enter()
        box = _make_box(spec, template, group, home, user)
    except OSError as e:
        wire.reply(channel, {"error": str(e), "errno": e.errno})
        return
    wire.reply(channel, {})
    channel.close()
    init.serve(control, box)


def _make_box(
    spec: wire.Head, template: rootfs.Template, group: cgroups.Group | None, home: int, user: bool
) -> init.Box:
    kernel.unshare(kernel.CLONE_NEWUTS | (0 if spec["network"] else kernel.CLONE_NEWNET))
    socket.sethostname("sandbox")
    if not spec["network"]:
        kernel.loopback_up()
    room = Room(template, home, _inner_user_namespace() if user else None)
    handles = group.handles() if group else None
    policy = supervisor.Policy(
        workdir=spec["workdir"],
        env=spec["env"],
        oom=handles[1] if handles else -1,
        processes=0 if handles else spec["pids"],
        memory_bytes=0 if handles else spec["memory_mb"] << 20,
    )

    def renew(_request: wire.Head | None = None) -> None:
        texts = rootfs.resolver() if spec["network"] else {}
        policy.shell = room.renew(workdir=spec["workdir"], disk_bytes=spec["disk_mb"] << 20, texts=texts)

    renew()
    kernel.limit_privileges()
    kernel.close_to_inspection()
    return init.Box(policy, enter=room.enter, renew=renew, handles=handles, grow=room.grow)


def _inner_user_namespace() -> int:
    """A user namespace below ours, made by a child because a process cannot come back from one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            kernel.unshare(kernel.CLONE_NEWUSER)
            kernel.map_self_to_root(0, 0)
            fd = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            socket.send_fds(theirs, [b"u"], [fd])
        finally:
            os._exit(0)
    theirs.close()
    try:
        data, fds = wire.receive_descriptors(ours, 1)
    finally:
        ours.close()
        os.waitpid(pid, 0)
    if not data or not fds:
        raise OSError("cannot make a user namespace within a user namespace")
    return fds[0]
