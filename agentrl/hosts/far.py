"""A program on a machine behind SSH, as its starter sees it: over any number of connections."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import asyncssh

from agentrl.errors import DeadlineError, InfraError, UnavailableError, UserError
from agentrl.hosts.forward import FORBIDDEN

log = logging.getLogger("agentrl.hosts")

_KILL_S = 15.0
_AGAIN_S = 0.2
_TIDY_S = 10.0


class Machine(Protocol):
    """What a program needs of its host."""

    name: str
    lease_s: float

    @property
    def up(self) -> bool: ...

    async def connection(self) -> asyncssh.SSHClientConnection: ...

    async def wait_link(self, *, up: bool) -> str: ...

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes: ...

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> tuple[int, str]: ...

    async def sweep(self, folder: str) -> None:
        """Ends what a killed guard left behind."""
        ...

    def ended(self, process: SshProcess) -> None: ...


class SshProcess:
    """`ports.Process`: a program under a guard of its own on another machine."""

    def __init__(self, host: Machine, label: str, folder: str, pid: int, nonce: str) -> None:
        self.label = label
        self.pid = pid
        self._host = host
        self._folder = folder
        self._nonce = nonce
        self._order = "renew"
        self._ordered = asyncio.Event()
        self._attended = False  # whether its guard was ever reached
        self._begun = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(self._over)
        self._watcher = asyncio.create_task(self._watch(), name=f"{host.name}: {label}")

    async def begin(self) -> None:
        """Until its guard hears us for the first time. UserError where the sshd there does not let us reach it."""
        await self._begun.wait()
        if self._ended.done():
            self._ended.result()

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as is known."""
        return self._ended.result() if self._ended.done() and self._ended.exception() is None else None

    async def wait(self) -> int:
        """As of a local process. While the machine is out of reach nothing is known, and this waits. UnavailableError
        where its end will not be heard of any more: it was left to its lease."""
        return await asyncio.shield(self._ended)

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM to the group; after grace_s SIGKILL to everything below. InfraError where even that leaves it. On a
        machine out of reach it ends with its lease, which is no longer renewed; UnavailableError where it has none."""
        if self._ended.done():
            return
        if self._out_of_reach():
            await self._abandon()
            return
        self._order = f"stop {max(0.0, grace_s):.3f}"
        self._ordered.set()
        try:
            async with asyncio.timeout(grace_s + _KILL_S):
                await self.wait()
        except TimeoutError:
            if self._out_of_reach():
                await self._abandon()
                return
            await self.forget()
            name = f"host {self._host.name}: {self.label} (process {self.pid})"
            raise InfraError(f"{name} cannot be killed") from None

    def _out_of_reach(self) -> bool:
        return not self._host.up

    async def _abandon(self) -> None:
        await self.forget()
        if not self._host.lease_s:
            raise UnavailableError(
                f"host {self._host.name} is out of reach, and {self.label} (process {self.pid}) goes on there",
                hint="end it when the host is back",
            )
        log.warning("host %s is out of reach: %s ends when its lease does", self._host.name, self.label)

    async def forget(self) -> None:
        """No more is heard of it, and its lease is not renewed."""
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        if not self._ended.done():
            told = f"host {self._host.name}: {self.label} (process {self.pid}) is left to its lease"
            self._ended.set_exception(UnavailableError(told))

    def _over(self, ended: asyncio.Future[int]) -> None:
        ended.exception()  # nobody need ask for it
        self._begun.set()
        self._host.ended(self)

    async def _watch(self) -> None:
        """Until its end is known; over any number of connections."""
        while not self._ended.done():
            try:
                code = await self._attend(await self._host.connection())
                if code is not None:
                    await self._tidy()
                    self._ended.set_result(code)
                    return
            except (UnavailableError, DeadlineError, asyncssh.Error, OSError):
                pass  # the connection: another will come
            except Exception as exc:
                self._ended.set_exception(exc)
                return
            await asyncio.sleep(_AGAIN_S)  # a connection just lost may still count as up
            await self._host.wait_link(up=True)

    async def _tidy(self) -> None:
        """Its code is known: what told it goes, unless another is in its place. A run leaves no file there."""
        remove = 'grep -qs -- "$2" "$1/code" && rm -rf -- "$1" && rmdir -- "${1%/*}" 2>/dev/null; true'
        with suppress(UnavailableError, DeadlineError):
            await self._host.run(["sh", "-c", remove, "sh", self._folder, self._nonce], timeout_s=_TIDY_S)

    async def _attend(self, connection: asyncssh.SSHClientConnection) -> int | None:
        """Until its end (its code) or the channel's (None)."""
        try:
            reader, writer = await connection.open_unix_connection(f"{self._folder}/socket", encoding="utf-8")
        except asyncssh.ChannelOpenError as exc:
            if exc.code == asyncssh.OPEN_CONNECT_FAILED:
                return await self._left()  # nobody listens
            raise
        self._attended = True
        self._begun.set()
        speaker = asyncio.create_task(self._speak(writer))
        try:
            while line := await reader.readline():
                said = read_json(line)
                if said.get("nonce", self._nonce) != self._nonce:
                    return 128 + 9  # another took its place
                if "code" in said:
                    return int(said["code"])
        finally:
            speaker.cancel()
            await asyncio.gather(speaker, return_exceptions=True)
            writer.close()
        return None

    async def _speak(self, writer: asyncssh.SSHWriter[str]) -> None:
        """The lease's renewals, and an order to stop: on each connection, for its guard may not have heard the last."""
        pause_s, said = (self._host.lease_s or 3600.0) / 4, ""
        while True:
            self._ordered.clear()
            word, said = (self._order if self._order != said else "renew"), self._order
            writer.write(f"{word}\n")
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ordered.wait(), pause_s)

    async def _left(self) -> int:
        """What its guard left; where that left nothing, it was killed."""
        with suppress(FileNotFoundError):
            said = read_json((await self._host.read(f"{self._folder}/code")).decode())
            return int(said["code"]) if said.get("nonce") == self._nonce else 128 + 9
        if not self._attended:  # an sshd that forbids us the socket says the same as if nobody listened
            code, _ = await self._host.run(["sh", "-c", 'kill -0 "$1"', "sh", str(self.pid)], timeout_s=_KILL_S)
            if code == 0:
                raise UserError(f"host {self._host.name}: {FORBIDDEN}", hint="allow it in its sshd_config")
        await self._host.sweep(self._folder)
        return 128 + 9


def read_json(text: str) -> dict[str, Any]:
    """Empty where it is no object."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
