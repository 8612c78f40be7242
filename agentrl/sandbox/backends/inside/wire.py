"""One call is one socket pair: a request frame, a reply frame, closed. The far end's hang-up cancels the call.

A frame is two little-endian u32 (length of the JSON head, length of the blob), the head, the blob.
"""

from __future__ import annotations

import json
import os
import socket
import struct

TYPE_CHECKING = False  # importing typing would cost memory and time in every box
if TYPE_CHECKING:
    from typing import Any

    Head = dict[str, Any]

HEADER = struct.Struct("<II")


def pack(head: Head, blob: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return HEADER.pack(len(text), len(blob)) + text + blob


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = channel.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise ConnectionError("the caller hung up within a frame")
        data += chunk
    return bytes(data)


def receive(channel: socket.socket) -> tuple[Head, bytes]:
    head, blob = HEADER.unpack(_exactly(channel, HEADER.size))
    return parse(_exactly(channel, head)), _exactly(channel, blob)


def reply(channel: socket.socket, head: Head, blob: bytes = b"") -> None:
    """A caller that has gone away is no error: its call was cancelled."""
    try:
        channel.sendall(pack(head, blob))
    except OSError:
        channel.close()


def parse(text: bytes) -> Head:
    head: Head = json.loads(text)
    return head


def ended(
    exit_code: int | None, killed: str = "", *, oom: bool = False, total: int = 0, head: int = 0, run_s: float = 0.0
) -> Head:
    """The reply to a command. killed: why we ended it, or nothing. total: bytes of its output; head: bytes of the blob
    that are its beginning, the rest is its end."""
    return {"exit": exit_code, "killed": killed, "oom": oom, "total": total, "head": head, "run_s": run_s}


def receive_descriptors(control: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """A word and the descriptors sent with it; no program that we run inherits them."""
    word, fds, _, _ = socket.recv_fds(control, 16, count)
    for fd in fds:
        os.set_inheritable(fd, False)
    return word, list(fds)
