"""A trainer's side of the run's HTTP face (`agentrl.wire`). No torch: any trainer can use it.

Each call may be repeated without doing work twice, so a face that is away for a moment is simply asked again, with a
growing pause, until `patience_s` has passed.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from agentrl import wire
from agentrl.errors import AgentRLError, DataError, InfraError, UnavailableError, UserError
from agentrl.records import Record, StepReport, Version, WeightsManifest
from agentrl.train import folders

_PART = 16 << 20  # bytes of one request, so that a slow line ends each in time
_PART_S = 120.0
_NO_ROOM = 507
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
        if not token.isascii() or not token.isprintable() or not token:
            raise UserError("this is no token", hint="It is what the file `token` of the run's folder holds.")
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

    # --- weights of a trainer that shares no disk with the run --------------------------------------------------------

    async def version(self) -> Version:
        """The version the run trained last, or starts from: the one to take and to claim with."""
        body = _ok(*await self._ask("GET", wire.VERSIONS), wire.VERSIONS)
        return Version(msgspec.json.decode(body)["version"])

    async def recipe(self) -> str:
        """The run's resolved recipe, TOML."""
        return _ok(*await self._ask("GET", wire.RECIPE), wire.RECIPE).decode()

    async def take(self, version: Version, folder: str, *, seed: str = "") -> None:
        """The model folder of `version` at `folder`, complete or absent; one that is there is left as it is.

        seed: a folder whose files are used instead of the run's where the checksums are equal. Raises DataError where
        the run does not hold that version, or a file was damaged on its way.
        """
        if (Path(folder) / wire.MANIFEST).is_file():
            return
        manifest = await self.manifest(version)
        with folders.arriving(folder, manifest) as arriving:
            await asyncio.to_thread(arriving.use, seed)
            for name, offset, size in arriving.lacking():
                while offset < size:
                    part = await self._part(f"{wire.WEIGHTS}/{version}/{name}", offset, min(_PART, size - offset))
                    offset = await asyncio.to_thread(arriving.append, name, part)
            await asyncio.to_thread(arriving.complete)

    async def manifest(self, version: Version) -> WeightsManifest:
        """Which files the run holds of `version`. DataError where it holds none."""
        listed = await self._part(f"{wire.WEIGHTS}/{version}/{wire.MANIFEST}", 0, _PART)
        return msgspec.json.decode(listed, type=WeightsManifest)

    async def give(self, lease: str, version: Version, folder: str, *, extra: Mapping[str, Any] | None = None) -> None:
        """The weights that the leased batch made, into the run's store: returns when they are complete there.

        May be repeated; what arrived is not sent again. A `manifest.json` of `version` in `folder` is taken at its
        word, else every file there is listed. Raises LeaseLost, UnavailableError (no room there), DataError.
        """
        manifest = await asyncio.to_thread(folders.manifest, folder, version, extra or {})
        sizes = {name: size for name, _, size in manifest.files}
        before: dict[str, int] = {}
        while lack := await self._offer(wire.WeightsOffer(lease=lease, manifest=manifest)):
            if lack == before:
                raise DataError(f"{folder}: {', '.join(lack)} cannot be sent whole: changed since they were listed?")
            before = lack
            for name, have in lack.items():
                await self._send(lease, Path(folder) / name, have, sizes[name])

    async def _offer(self, offer: wire.WeightsOffer) -> dict[str, int]:
        status, body = await self._post(wire.GIVE, offer, _PART_S + sum(f[2] for f in offer.manifest.files) / 50e6)
        if status == 410:
            raise LeaseLost(_problem(body).message)
        if status == _NO_ROOM:
            raise UnavailableError(_problem(body).message, hint=_problem(body).hint)
        if status == 400:
            raise DataError(_problem(body).message, hint=_problem(body).hint)
        return msgspec.json.decode(_ok(status, body, wire.GIVE), type=wire.WeightsLack).have

    async def _send(self, lease: str, path: Path, offset: int, size: int) -> None:
        while offset < size:
            part = await asyncio.to_thread(_read, path, offset)
            query = {"lease": lease, "offset": str(offset)}
            at = f"{wire.GIVE}/{path.name}"
            status, body = await self._ask("PUT", at, body=part, query=query, timeout_s=_PART_S)
            if status == 410:
                raise LeaseLost(_problem(body).message)
            had, offset = offset, msgspec.json.decode(_ok(status, body, at), type=wire.Received).have
            if offset <= had:
                return  # somebody else sends under this lease, or the run was started again: offer anew

    async def _part(self, path: str, offset: int, size: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + size - 1}"}
        status, body = await self._ask("GET", path, headers=headers, timeout_s=_PART_S)
        if status == 404:
            raise DataError(_problem(body).message, hint="The run has moved on: ask which version it expects.")
        return body if status == 206 else _ok(status, body, path)

    async def _post(self, path: str, request: Record, timeout_s: float) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        return await self._ask("POST", path, body=msgspec.json.encode(request), headers=headers, timeout_s=timeout_s)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = _ANSWER_S,
    ) -> tuple[int, bytes]:
        assert self._session is not None, "RunClient is used as a context manager"
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        while True:
            try:
                async with self._session.request(
                    method,
                    self._base + path,
                    data=body and io.BytesIO(body),
                    headers=headers,
                    params=query,
                    timeout=timeout,
                ) as answer:
                    said = await answer.read()
                    if answer.status < 500 or answer.status == _NO_ROOM:
                        return answer.status, said
                    away = f"HTTP {answer.status}"
            except _AWAY as exc:
                away = f"{type(exc).__name__} {exc}".strip()
            if time.monotonic() - began > self._patience_s:
                message = f"{self._base}{path}: the run has not answered for {self._patience_s:.0f} s ({away})"
                raise UnavailableError(message, hint="Is `agentrl run` still there? Attach again once it is.")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), _PART, offset)


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
