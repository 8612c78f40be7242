"""From a forked process to a box: control groups, namespaces, the file system, then its init."""

from __future__ import annotations

import os
import socket

from agentrl.sandbox.backends.inside import cgroups, init, kernel, supervisor, wire
from agentrl.sandbox.backends.inside.rootfs import Template


def run(
    spec: wire.Head,
    channel: socket.socket,
    control: socket.socket,
    template: Template,
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


def _make_box(spec: wire.Head, template: Template, group: cgroups.Group | None, home: int, user: bool) -> init.Box:
    kernel.unshare(kernel.CLONE_NEWUTS | (0 if spec["network"] else kernel.CLONE_NEWNET))
    socket.sethostname("sandbox")
    if not spec["network"]:
        kernel.loopback_up()
    inner_user = _inner_user_namespace() if user else None
    mounts: list[int] = []

    def renew() -> None:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        try:
            policy.shell = template.build(
                workdir=spec["workdir"], disk_bytes=spec["disk_mb"] << 20, network=spec["network"]
            )
            mounts.append(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            kernel.setns(home, kernel.CLONE_NEWNS)
        if len(mounts) > 1:
            os.close(mounts.pop(0))  # the last reference: the old file system and its pages are freed

    def grow(count: int) -> None:
        kernel.setns(mounts[0], kernel.CLONE_NEWNS)
        try:
            template.grow(count)
        finally:
            kernel.setns(home, kernel.CLONE_NEWNS)

    def enter() -> None:
        kernel.setns(mounts[0], kernel.CLONE_NEWNS)
        if inner_user is not None:
            kernel.setns(inner_user, kernel.CLONE_NEWUSER)
        for fd in (home, mounts[0], inner_user):
            if fd is not None:
                os.close(fd)
        kernel.drop_privileges()

    handles = group.handles() if group else None
    policy = supervisor.Policy(
        workdir=spec["workdir"],
        env=spec["env"],
        oom=handles[1] if handles else -1,
        processes=0 if handles else spec["pids"],
        memory_bytes=0 if handles else spec["memory_mb"] << 20,
    )
    renew()
    kernel.limit_privileges()
    kernel.close_to_inspection()
    return init.Box(policy, enter=enter, renew=renew, handles=handles, grow=grow)


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
