"""An address here that reaches one on a machine behind SSH, over any number of connections.

The listener here is ours and stays, so that nobody else takes its port while the link is down; who connects meanwhile
is hung up on at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import asyncssh

log = logging.getLogger("agentrl.hosts")

Current = Callable[[], asyncssh.SSHClientConnection | None]
FORBIDDEN = "its sshd forbids forwarding (AllowTcpForwarding, AllowStreamLocalForwarding, DisableForwarding)"


class Forward:
    """there: "HOST:PORT" or "unix:/path" on the machine. current: the connection to it, None while there is none."""

    def __init__(self, name: str, there: str, current: Current) -> None:
        self.there = there
        self._name = name
        self._current = current
        self._server: asyncio.Server | None = None
        self._calls: set[_Near] = set()

    async def listen(self, socket: Path | None) -> str:
        """The address here: `socket`, or a port of the loopback."""
        loop = asyncio.get_running_loop()
        if socket is not None:
            self._server = await loop.create_unix_server(self._call, str(socket))
            return f"unix:{socket}"
        self._server = await loop.create_server(self._call, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        calls = tuple(self._calls)
        for call in calls:
            call.end()
        await asyncio.gather(*(call.opening for call in calls), return_exceptions=True)

    async def open(self, near: _Near) -> asyncssh.SSHTCPChannel[bytes]:
        """One channel to the address there. asyncssh.Error or OSError where that cannot be had."""
        connection = self._current()
        if connection is None:
            raise ConnectionResetError("the link is down")
        try:
            if self.there.startswith("unix:"):
                path = self.there.removeprefix("unix:")
                channel, _ = await connection.create_unix_connection(lambda: _FarUnix(near), path)
                return cast("asyncssh.SSHTCPChannel[bytes]", channel)  # the two differ in nothing that is used here
            host, _, port = self.there.rpartition(":")
            tcp, _ = await connection.create_connection(lambda: _FarTcp(near), host, int(port))
            return tcp
        except asyncssh.ChannelOpenError as exc:
            if exc.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                log.error("host %s: %s cannot be reached: %s", self._name, self.there, FORBIDDEN)
            raise

    def _call(self) -> _Near:
        call = _Near(self)
        self._calls.add(call)
        return call

    def over(self, call: _Near) -> None:
        self._calls.discard(call)


class _Near(asyncio.Protocol):
    """One connection to our listener."""

    transport: asyncio.Transport
    opening: asyncio.Task[None]

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._channel: asyncssh.SSHTCPChannel[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.pause_reading()
        self.opening = asyncio.create_task(self._open(), name=f"forward to {self._forward.there}")

    async def _open(self) -> None:
        try:
            self._channel = await self._forward.open(self)
        except (asyncssh.Error, OSError):
            self.transport.abort()
            return
        if self.transport.is_closing():
            self._channel.abort()
        else:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.write(data)

    def eof_received(self) -> bool:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.write_eof()
        return True

    def pause_writing(self) -> None:
        if self._channel is not None:
            self._channel.pause_reading()

    def resume_writing(self) -> None:
        if self._channel is not None:
            self._channel.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forward.over(self)
        if self._channel is not None:
            self._channel.close()

    def end(self) -> None:
        self.opening.cancel()
        self.transport.abort()


class _Far:
    """The other end of it: what arrives is passed on."""

    def __init__(self, near: _Near) -> None:
        self._near = near

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._near.transport.write(data)

    def eof_received(self) -> bool:
        with suppress(OSError):
            self._near.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        self._near.transport.pause_reading()

    def resume_writing(self) -> None:
        self._near.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._near.transport.abort()
        else:
            self._near.transport.close()


class _FarTcp(_Far, asyncssh.SSHTCPSession[bytes]):
    pass


class _FarUnix(_Far, asyncssh.SSHUNIXSession[bytes]):
    pass
