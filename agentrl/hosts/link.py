"""The one SSH connection to a machine: made by the user's own ~/.ssh, kept, made anew.

It is made when somebody first asks for it, and what stands in the way is said then. Lost later, it is tried again, ever
less often, until it is closed. A machine that is silent for `silence_s` counts as lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncssh

from agentrl.errors import AgentRLError, UnavailableError, UserError

log = logging.getLogger("agentrl.hosts")

_BACKOFF_S = (0.1, 5.0)  # first, longest
_SSH_PORT = 22
_AGAIN_S = 5.0  # of one try to connect again: the kernel's own repeats come too seldom for a link that is back


class Link:
    def __init__(self, name: str, address: str, user: str, port: int, *, silence_s: float, connect_s: float) -> None:
        self.name = name
        self._address = address
        self._user = user
        self._port = port
        self._silence_s = silence_s
        self._connect_s = connect_s
        self._connection: asyncssh.SSHClientConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._news = asyncio.Condition()
        self.reason = "not connected yet"

    @property
    def target(self) -> str:
        """As the user would give it to ssh."""
        user = f"{self._user}@" if self._user else ""
        return f"{user}{self._address}" + (f" -p {self._port}" if self._port else "")

    @property
    def up(self) -> bool:
        return self._connection is not None

    def current(self) -> asyncssh.SSHClientConnection | None:
        return self._connection

    async def connection(self) -> asyncssh.SSHClientConnection:
        """UnavailableError where there is none now."""
        async with self._opening:
            if self._keeper is None:
                self._connection = await self._connect(self._connect_s)
                self.reason = "connected"
                self._keeper = asyncio.create_task(self._keep(), name=f"link to {self.name}")
        if self._connection is None:
            raise UnavailableError(f"host {self.name}: the connection is lost ({self.reason})", hint=self._hint())
        return self._connection

    @asynccontextmanager
    async def another(self) -> AsyncIterator[asyncssh.SSHClientConnection]:
        """A connection of its own for a bulk transfer, which would hold up everybody else's words, and on a slow line
        the signs of life as well."""
        await self.connection()
        connection = await self._connect(self._connect_s)
        try:
            yield connection
        finally:
            connection.abort()

    async def wait(self, *, up: bool) -> str:
        async with self._news:
            await self._news.wait_for(lambda: self.up is up)
        return self.reason

    async def aclose(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _keep(self) -> None:
        while True:
            assert self._connection is not None
            await self._connection.wait_closed()
            await self._now(None, f"silent for {self._silence_s:g} s, or closed from there")
            pause_s, longest_s = _BACKOFF_S
            while not self.up:
                try:
                    connection = await self._connect(min(self._connect_s, _AGAIN_S))
                except Exception as exc:  # whatever it is, nobody else tries again
                    self.reason = str(exc)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, longest_s)
                else:
                    await self._now(connection, "connected again")

    async def _now(self, connection: asyncssh.SSHClientConnection | None, reason: str) -> None:
        log.warning("host %s: %s", self.name, reason)
        async with self._news:
            self._connection, self.reason = connection, reason
            self._news.notify_all()

    async def _connect(self, within_s: float) -> asyncssh.SSHClientConnection:
        try:
            async with asyncio.timeout(within_s):
                return await asyncssh.connect(
                    self._address,
                    self._port or (),
                    username=self._user or (),
                    keepalive_interval=self._silence_s / 3,
                    keepalive_count_max=2,
                )
        except BaseException as exc:
            raise self._said(exc) from exc

    def _said(self, exc: BaseException) -> BaseException:
        """What went wrong, in the user's terms. Anything unexpected is left as it is."""
        where = f"host {self.name} ({self._address})"
        match exc:
            case asyncssh.HostKeyNotVerifiable():
                return self._untrusted(where, exc.reason.rpartition(" for host ")[2].split()[0])
            case asyncssh.PermissionDenied():
                hint = f"{self._hint()}: `ssh-copy-id {self.target}`, or `ssh-add` where the key has a passphrase"
                return UnavailableError(f"{where}: login refused ({exc.reason})", hint=hint)
            case asyncssh.ConfigParseError() | asyncssh.KeyImportError() | ValueError():
                return UserError(f"{where}: ~/.ssh: {exc}", hint="mend your ssh configuration")
            case socket.gaierror():
                return UnavailableError(f"{where}: no such address ({exc.strerror})", hint="correct hosts.address")
            case TimeoutError():
                return UnavailableError(
                    f"{where}: no answer from {self._resolved()[0]} within {self._connect_s:g} s", hint=self._hint()
                )
            case AgentRLError():
                return exc
            case OSError() | asyncssh.Error():
                return UnavailableError(f"{where}: {exc}", hint=self._hint())
        return exc

    def _untrusted(self, where: str, asked: str) -> UnavailableError:
        """asked: the name or address under which ssh looks for the key; a jump host's, where that is the stranger."""
        host, port = self._resolved()
        port = port if asked == host else _SSH_PORT
        entry, scan = (asked, asked) if port == _SSH_PORT else (f"'[{asked}]:{port}'", f"-p {port} {asked}")
        if _knows(asked, port):
            return UnavailableError(
                f"{where}: its host key is not the one in ~/.ssh/known_hosts: another machine answers at {asked}, or it"
                " was set up anew",
                hint=f"find out which; only then `ssh-keygen -R {entry}` and `ssh {self.target}`",
            )
        return UnavailableError(
            f"{where}: its host key is not in ~/.ssh/known_hosts, where {asked} is looked for",
            hint=f"compare and accept it once: `ssh {self.target}`, or `ssh-keyscan {scan} >> ~/.ssh/known_hosts`",
        )

    def _resolved(self) -> tuple[str, int]:
        """Host and port as ~/.ssh/config has them."""
        options = asyncssh.SSHClientConnectionOptions(host=self._address, port=self._port or (), config=())
        return options.host, options.port

    def _hint(self) -> str:
        return f"`ssh {self.target} true` must work without a question"


def _knows(host: str, port: int) -> bool:
    with suppress(OSError, ValueError):
        known = asyncssh.read_known_hosts(str(Path("~/.ssh/known_hosts").expanduser()))
        return any(any(known.match(host, "", each)) for each in (port, None))
    return False
