"""A box's file system in a mount namespace of its own. The init stays outside it, so that it can build a fresh one; its
workers enter."""

from __future__ import annotations

import os

from agentrl.sandbox.backends.inside import kernel

TYPE_CHECKING = False  # importing typing would cost memory and time in every box
if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.sandbox.backends.inside.rootfs import Template


class Room:
    """home: descriptor of the init's own mount namespace. user: of a user namespace for commands, or None."""

    def __init__(self, template: Template, home: int, user: int | None = None) -> None:
        self._template, self._home, self._user = template, home, user
        self._mounts: list[int] = []

    def renew(self, *, workdir: str, disk_bytes: int, texts: Mapping[str, str]) -> str:
        """A fresh file system and IPC namespace; the old ones are freed. Returns the shell to use."""
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        try:
            shell = self._template.build(workdir=workdir, disk_bytes=disk_bytes, texts=texts)
            self._mounts.append(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            kernel.setns(self._home, kernel.CLONE_NEWNS)
        if len(self._mounts) > 1:
            os.close(self._mounts.pop(0))  # the last reference: the old file system and its pages are freed
        return shell

    def grow(self, count: int) -> None:
        kernel.setns(self._mounts[0], kernel.CLONE_NEWNS)
        try:
            self._template.grow(count)
        finally:
            kernel.setns(self._home, kernel.CLONE_NEWNS)

    def enter(self) -> None:
        """For a worker: from here on it is in the box and holds no more than a command may."""
        kernel.setns(self._mounts[0], kernel.CLONE_NEWNS)
        if self._user is not None:
            kernel.setns(self._user, kernel.CLONE_NEWUSER)
        for fd in (self._home, self._mounts[0], self._user):
            if fd is not None:
                os.close(fd)
        kernel.drop_privileges()
