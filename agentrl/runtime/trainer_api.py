"""The part of the run's HTTP face that trainers use: batches, and weights of those that share no disk with the run.

The routes are those of `agentrl.wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from agentrl import ports, wire
from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.records import Record, Version
from agentrl.runtime.desk import TrainerDesk
from agentrl.runtime.loop import Driver

_PIECE = 1 << 20

T = TypeVar("T")


class TrainerFace:
    """inbox: None where the run takes no weights over the network."""

    def __init__(self, driver: Driver, desk: TrainerDesk, inbox: ports.WeightInbox | None) -> None:
        self._driver = driver
        self._desk = desk
        self._inbox = inbox

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(wire.CLAIM, self._claim),
            web.post(wire.RENEW, self._renew),
            web.post(wire.ACK, self._ack),
            web.post(wire.GIVE, self._offer),
            web.put(wire.GIVE + "/{name}", self._receive),
            web.get(wire.WEIGHTS + r"/{version:\d+}/{name}", self._weights),
        ]

    async def _claim(self, request: web.Request) -> web.Response:
        claim = await self._desk.claim(await _body(request, wire.ClaimRequest))
        if claim is None:
            return web.Response(status=204)
        body = await asyncio.to_thread(msgspec.msgpack.encode, claim)
        return web.Response(body=body, content_type=wire.MSGPACK)

    async def _renew(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.RenewRequest)
        await self._desk.renew(asked.lease, asked.lease_s)
        self._driver.progressed()
        return web.json_response({})

    async def _ack(self, request: web.Request) -> web.Response:
        ack = await _body(request, wire.Ack)
        await self._desk.ack(ack.lease, ack.report)
        return web.json_response({})

    async def _offer(self, request: web.Request) -> web.Response:
        offer = await _body(request, wire.WeightsOffer)
        self._desk.owes(offer.lease, offer.manifest.version)
        try:
            return _json(wire.WeightsLack(have=await self._taking().offer(offer.manifest)))
        except UnavailableError as exc:
            return _refused(507, str(exc), hint=exc.hint)

    async def _receive(self, request: web.Request) -> web.Response:
        try:
            lease, offset = request.query["lease"], int(request.query["offset"])
        except (KeyError, ValueError):
            raise UserError("a file is sent with ?lease=LEASE&offset=BYTES") from None
        self._desk.owes(lease)
        have = await self._taking().receive(request.match_info["name"], offset, self._pieces(request))
        return _json(wire.Received(have=have))

    async def _pieces(self, request: web.Request) -> AsyncIterator[bytes]:
        with contextlib.suppress(ConnectionError):  # what has come is kept; the sender asks how much that is
            async for piece in request.content.iter_chunked(_PIECE):
                self._driver.progressed()
                yield piece

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        version, name = Version(int(request.match_info["version"])), request.match_info["name"]
        try:
            folder = Path(await asyncio.to_thread(self._driver.world.weights.path, version))
        except DataError as exc:
            return _refused(404, str(exc))
        file = folder / name
        if file.parent != folder or not file.is_file():
            return _refused(404, f"version {version} has no file {name!r}")
        return web.FileResponse(file)

    def _taking(self) -> ports.WeightInbox:
        if self._inbox is None:
            raise UserError("this run takes no weights over the network")
        return self._inbox


async def _body(request: web.Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.read(), type=kind)


def _json(value: Record, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def _refused(status: int, message: str, *, hint: str = "") -> web.Response:
    return _json(wire.Refused(error=wire.Problem(message=message, hint=hint)), status=status)
