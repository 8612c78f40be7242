"""Files in and out of a box, by a process that is inside it and holds no more rights than its commands: a symbolic link
that the agent planted leads nowhere that the agent could not go itself."""

from __future__ import annotations

import contextlib
import os
import stat

from agentrl.sandbox.backends.inside import wire


def put(files: list[tuple[str, int, int]], blob: bytes) -> wire.Head:
    """files: (absolute path, mode, length); the contents follow one another in `blob`. Whatever had the name is
    replaced, never written through: not a link, not a pipe."""
    at = 0
    for path, mode, length in files:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            data = memoryview(blob)[at : at + length]
            while data:
                data = data[os.write(fd, data) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        at += length
    return {}


def get(path: str, limit: int) -> tuple[wire.Head, bytes]:
    """The first `limit` bytes of a regular file. A pipe or a device would block or never end: it counts as absent."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {"absent": True}, b""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return {"absent": True}, b""
        data = bytearray()
        while len(data) < limit and (chunk := os.read(fd, min(limit - len(data), 1 << 20))):
            data += chunk
        return {}, bytes(data)
    finally:
        os.close(fd)
