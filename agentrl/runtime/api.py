"""The run's HTTP face, on loopback with a token: status, event stream, trainers, pause, drain.

GET  /v1/status            Status
GET  /v1/attempts/{group}/{member}/{try}  Life: what one attempt has done
GET  /metrics              for Prometheus
GET  /v1/events            server-sent events: {"now", "event", "commands"} as they happen
POST /v1/pause {"on": b}   no new attempts and batches until {"on": false}
POST /v1/drain             stop soon, leave a resumable run
POST /v1/publish {"version": v}  a version put into the store by hand goes live
GET  /v1/versions          {"version", "engines": {name: version}}: what the trainer and each engine hold
GET  /v1/recipe            the resolved recipe, TOML
/v1/trainer/..., /v1/weights/...  see agentrl.wire
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from aiohttp import web

from agentrl import ports, wire
from agentrl.errors import AgentRLError
from agentrl.records import AttemptId, GroupId, Version
from agentrl.runtime.desk import LeaseGone, RunOver, TrainerDesk, WrongVersion
from agentrl.runtime.loop import Driver, Service
from agentrl.runtime.metrics import CONTENT_TYPE, Metrics
from agentrl.runtime.recent import Recent
from agentrl.runtime.status import Life, Status, picture
from agentrl.runtime.trainer_api import TrainerFace
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news

_STREAM_BACKLOG = 10_000  # events a slow reader may lag behind before it is cut off

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stream:
    """Fan-out of what the driver does; a reader that lags too far is dropped, the run never waits for one."""

    def __init__(self) -> None:
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self.sent_bytes = 0  # to all readers together

    def publish(self, now: float, event: news.Event, commands: Sequence[orders.Command]) -> None:
        if not self._readers:
            return
        line = msgspec.json.encode({"now": now, "event": event, "commands": commands})
        self.sent_bytes += len(line) * len(self._readers)
        for reader in list(self._readers):
            try:
                reader.put_nowait(line)
            except asyncio.QueueFull:
                self._readers.discard(reader)
                reader.get_nowait()
                reader.put_nowait(None)

    @property
    def readers(self) -> int:
        return len(self._readers)

    def close(self) -> None:
        for reader in self._readers:
            with contextlib.suppress(asyncio.QueueFull):
                reader.put_nowait(None)

    @contextlib.contextmanager
    def reader(self) -> Iterator[asyncio.Queue[bytes | None]]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_STREAM_BACKLOG)
        self._readers.add(queue)
        try:
            yield queue
        finally:
            self._readers.discard(queue)


class Face:
    """One run's server. `service` binds, announces its URL through `bound`, and serves until cancelled."""

    def __init__(
        self,
        driver: Driver,
        desk: TrainerDesk,
        token: str,
        bound: Callable[[str], None],
        *,
        recipe: str = "",
        inbox: ports.WeightInbox | None = None,
    ) -> None:
        """recipe: TOML, for trainers that attach from afar. inbox: None where weights come by the run's disk only."""
        self._driver = driver
        self._desk = desk
        self._token = token
        self._bound = bound
        self.stream = Stream()
        self.recent = Recent()
        self.metrics: Metrics | None = None
        self.lives: Callable[[AttemptId], Life] = lambda attempt: Life()  # in a thread
        self._recipe = recipe
        self._trainers = TrainerFace(driver, desk, inbox)

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command]) -> None:
        """What the driver did, after it did it."""
        self.recent.heard(now, event, commands, self._driver.core)
        self.stream.publish(now, event, commands)

    def service(self, port: int, *, linger_s: float = 0.0) -> Service:
        """linger_s: how long to stay after the end for attached trainers that have not been told of it."""

        async def serve(_: Callable[[news.Event], None]) -> None:
            runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", port)
                await site.start()
                self._bound(f"http://127.0.0.1:{runner.addresses[0][1]}")
                await asyncio.Event().wait()
            finally:
                await self._desk.aclose()
                self.stream.close()
                await self._desk.dismissed(within_s=linger_s)
                await runner.cleanup()

        return serve

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 20)
        app.add_routes(
            [
                web.get("/v1/status", self._status),
                web.get(r"/v1/attempts/{group:\d+}/{member:\d+}/{attempt:\d+}", self._life),
                web.get("/metrics", self._told_metrics),
                web.get("/v1/events", self._events),
                web.get(wire.VERSIONS, self._versions),
                web.get(wire.RECIPE, self._told_recipe),
                web.post("/v1/pause", self._pause),
                web.post("/v1/publish", self._publish),
                web.post("/v1/drain", self._drain),
                *self._trainers.routes(),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return _problem(401, "no or wrong token", hint="send Authorization: Bearer with the run's token file")
        try:
            return await handler(request)
        except WrongVersion as exc:
            return _problem(409, str(exc), hint=exc.hint, expected=exc.expected)
        except (RunOver, LeaseGone) as exc:
            return _problem(410, str(exc), hint=exc.hint)
        except (msgspec.DecodeError, AgentRLError) as exc:
            return _problem(400, str(exc))

    def picture(self) -> Status:
        world = self._driver.world
        return picture(self._driver.core, world.clock(), self.recent, loop_lag_s=world.lag.worst_s)

    async def _status(self, request: web.Request) -> web.Response:
        return _json(self.picture())

    async def _life(self, request: web.Request) -> web.Response:
        group, member, attempt = (int(request.match_info[part]) for part in ("group", "member", "attempt"))
        return _json(await asyncio.to_thread(self.lives, AttemptId(GroupId(group), member, attempt)))

    async def _told_metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            return _problem(404, "this run has no metrics")
        return web.Response(body=await asyncio.to_thread(self.metrics.now()), headers={"Content-Type": CONTENT_TYPE})

    async def _versions(self, request: web.Request) -> web.Response:
        core = self._driver.core
        engines = {name: engine.version for name, engine in sorted(core.router.engines.items())}
        return _json({"version": core.version, "engines": engines})

    async def _pause(self, request: web.Request) -> web.Response:
        try:
            on = json.loads(await request.text())["on"]
        except (ValueError, KeyError, TypeError):
            return _problem(400, 'the body is not {"on": true | false}')
        self._driver.post(news.PauseAsked(on=bool(on)))
        return _json({})

    async def _publish(self, request: web.Request) -> web.Response:
        try:
            version = Version(int(json.loads(await request.text())["version"]))
        except (ValueError, KeyError, TypeError):
            return _problem(400, 'the body is not {"version": number}')
        core = self._driver.core
        if version <= core.version:
            return _problem(409, f"the run is at version {core.version}; versions only grow", expected=core.version)
        if core.training is not None:
            return _problem(409, f"a step from version {core.version} is running", hint="pause, wait for it, try again")
        await asyncio.to_thread(
            self._driver.world.weights.path, version
        )  # complete, or a DataError that says what lacks
        self._desk.expect(version)
        self._driver.post(news.WeightsOffered(version=version))
        return _json({"version": version})

    async def _drain(self, request: web.Request) -> web.Response:
        self._driver.post(news.DrainAsked())
        return _json({})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        with self.stream.reader() as queue, contextlib.suppress(ConnectionResetError):  # the reader has gone
            while (line := await queue.get()) is not None:
                await response.write(b"data: " + line + b"\n\n")
        return response

    async def _told_recipe(self, request: web.Request) -> web.Response:
        return web.Response(text=self._recipe, content_type="application/toml")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _problem(status: int, message: str, *, hint: str = "", expected: int | None = None) -> web.Response:
    error = {"message": message, "hint": hint, "expected": expected}
    return web.Response(status=status, body=msgspec.json.encode({"error": error}), content_type="application/json")
