"""A trainer's side of the run's HTTP face (`agentrl.wire`). No torch: any trainer can use it.

Each call may be repeated without doing work twice, so a face that is away for a moment is simply asked again, with a
growing pause, until `patience_s` has passed.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from agentrl import wire
from agentrl.errors import AgentRLError, InfraError, UnavailableError, UserError
from agentrl.records import Record, StepReport, Version

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_ANSWER_S = 15.0  # for a call that waits for nothing
_OTHER_VERSION = "Trainer and run may be of different versions of agentrl: install the same."
_AWAY = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError, ConnectionError)


class RunOver(AgentRLError):
    """The run needs no more steps."""


class WrongVersion(AgentRLError):
    """The run hands out batches for another version."""

    def __init__(self, message: str, expected: Version | None) -> None:
        super().__init__(message)
        self.expected = expected


class LeaseLost(InfraError):
    """Somebody else may hold the batch by now."""


class RunClient:
    """Use as `async with RunClient(...) as run`. Calls raise UserError (the token is refused), UnavailableError (away
    for longer than `patience_s`), and what each one names."""

    def __init__(self, url: str, token: str, *, trainer: str = "trainer", patience_s: float = 60.0) -> None:
        """url: `http://HOST:PORT` or `unix:///path/to/socket`."""
        self._unix = url.removeprefix("unix://") if url.startswith("unix://") else ""
        self._base = "http://run" if self._unix else url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._trainer = trainer
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.UnixConnector(self._unix) if self._unix else aiohttp.TCPConnector()
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    async def claim(self, version: Version, *, lease_s: float, wait_s: float) -> wire.Claim | None:
        """A batch for `version`, or None where none came within wait_s. Raises WrongVersion, RunOver."""
        ask = wire.ClaimRequest(trainer=self._trainer, version=version, lease_s=lease_s, wait_s=wait_s)
        status, body = await self._post(wire.CLAIM, ask, wait_s + _ANSWER_S)
        if status == 204:
            return None
        if status == 409:
            problem = _problem(body)
            raise WrongVersion(problem.message, problem.expected)
        if status == 410:
            raise RunOver(_problem(body).message)
        try:
            return msgspec.msgpack.decode(_ok(status, body, wire.CLAIM), type=wire.Claim)
        except msgspec.MsgspecError as exc:
            raise AgentRLError(f"{wire.CLAIM}: the batch does not decode: {exc}", hint=_OTHER_VERSION) from exc

    async def renew(self, lease: str, *, lease_s: float) -> None:
        """Raises LeaseLost."""
        status, body = await self._post(wire.RENEW, wire.RenewRequest(lease=lease, lease_s=lease_s), _ANSWER_S)
        if status == 410:
            raise LeaseLost(_problem(body).message)
        _ok(status, body, wire.RENEW)

    async def ack(self, lease: str, report: StepReport) -> None:
        """The step is done and its weights are in the store. Raises LeaseLost."""
        status, body = await self._post(wire.ACK, wire.Ack(lease=lease, report=report), _ANSWER_S)
        if status == 410:
            raise LeaseLost(_problem(body).message)
        _ok(status, body, wire.ACK)

    async def _post(self, path: str, request: Record, timeout_s: float) -> tuple[int, bytes]:
        assert self._session is not None, "RunClient is used as a context manager"
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                async with self._session.post(
                    self._base + path,
                    data=msgspec.json.encode(request),
                    headers={"Content-Type": "application/json"},
                    timeout=aiohttp.ClientTimeout(total=timeout_s),
                ) as answer:
                    body = await answer.read()
                    if answer.status < 500:
                        return answer.status, body
                    away = f"HTTP {answer.status}"
            except _AWAY as exc:
                away = f"{type(exc).__name__} {exc}".strip()
            if time.monotonic() - began > self._patience_s:
                message = f"{self._base}{path}: the run has not answered for {self._patience_s:.0f} s ({away})"
                raise UnavailableError(message, hint="Is `agentrl run` still there? Attach again once it is.")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _ok(status: int, body: bytes, path: str) -> bytes:
    if status == 200:
        return body
    message = f"{path}: HTTP {status}: {_problem(body).message}"
    if status in (401, 403):
        raise UserError(message, hint="The token file belongs to another run, or was made anew: read it again.")
    raise AgentRLError(message, hint=_OTHER_VERSION)


def _problem(body: bytes) -> wire.Problem:
    try:
        return msgspec.json.decode(body, type=wire.Refused).error
    except msgspec.MsgspecError:
        return wire.Problem(message=body[:200].decode(errors="replace"))
