"""The run's HTTP face on a real socket, around a driver that does not turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from agentrl import wire
from agentrl.errors import DataError
from agentrl.records import Batch, StepReport, Version
from agentrl.runtime.api import Face
from agentrl.runtime.desk import TrainerDesk
from agentrl.runtime.effects import World
from agentrl.runtime.loop import Driver, Listener
from agentrl.runtime.metrics import Metrics
from agentrl.runtime.status import Status
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim
from agentrl.sim.clock import run as virtual

TOKEN = "secret"
POLICY = Policy(steps=4, groups=1, siblings=2, window_groups=2, window_attempts=4, bound=2)

Ask = Callable[..., Awaitable[tuple[int, Any]]]


class Weights(sim.SimWeights):
    def path(self, version: Version) -> str:
        if version > 7:
            raise DataError(f"version {version} is absent")
        return super().path(version)


def with_face(body: Callable[[Face, Driver, TrainerDesk, Ask], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        desk = TrainerDesk(Version(0), loop.time)
        world = World(
            player=sim.SimPlayer(0, sim.KIND, {}, {}, loop.time),
            tasks=sim.SimTasks(),
            journal=sim.SimJournal(),  # type: ignore[arg-type]
            weights=Weights(),
            trainer=desk,
            clock=loop.time,
            keep_versions=2,
            admin_s=1.0,
        )
        driver = Driver(Core(POLICY), world, [], Listener())
        bound: asyncio.Future[str] = loop.create_future()
        face = Face(driver, desk, TOKEN, bound.set_result)
        server = asyncio.ensure_future(face.service(0)(driver.post))
        url = await bound
        try:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:

                async def ask(method: str, path: str, value: object = None, **more: Any) -> tuple[int, Any]:
                    data = None if value is None else msgspec.json.encode(value)
                    async with session.request(method, url + path, data=data, **more) as response:
                        raw = await response.read()
                        if response.content_type == wire.MSGPACK:
                            return response.status, msgspec.msgpack.decode(raw, type=wire.Claim)
                        if response.content_type == "text/plain":
                            return response.status, raw.decode()
                        return response.status, json.loads(raw) if raw else None

                async with asyncio.timeout(20):
                    await body(face, driver, desk, ask)
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    asyncio.run(main())


def test_prometheus_is_answered_with_the_token_only() -> None:
    async def body(face: Face, driver: Driver, desk: TrainerDesk, ask: Ask) -> None:
        assert (await ask("GET", "/metrics"))[0] == 404  # a run that keeps none
        face.metrics = Metrics(face.picture, face.recent.rates, list, dict)
        assert (await ask("GET", "/metrics", headers={"Authorization": "Bearer wrong"}))[0] == 401
        status, told = await ask("GET", "/metrics")
        assert status == 200
        assert 'agentrl_trainer_state{state="absent"} 1.0' in told

    with_face(body)


def test_nothing_is_told_without_the_token() -> None:
    async def body(face: Face, driver: Driver, desk: TrainerDesk, ask: Ask) -> None:
        for path in ("/v1/status", "/v1/events", "/v1/versions"):
            status, answer = await ask("GET", path, headers={"Authorization": "Bearer wrong"})
            assert status == 401
            assert "token" in answer["error"]["message"]
        assert (await ask("GET", "/v1/status"))[0] == 200

    with_face(body)


def test_status_is_a_picture_of_the_core() -> None:
    async def body(face: Face, driver: Driver, desk: TrainerDesk, ask: Ask) -> None:
        driver.core.handle(news.EngineUp(engine="e0", epoch=0, version=Version(0), ranks=2, slots=4, kv_tokens=99), 0.0)
        status, answer = await ask("GET", "/v1/status")
        picture = msgspec.convert(answer, Status)
        assert status == 200
        assert [(e.name, e.slots, e.phase) for e in picture.engines] == [("e0", 8, "serving")]
        assert picture.blockers == "no sandbox host is up"
        assert await ask("GET", "/v1/versions") == (200, {"version": 0, "engines": {"e0": 0}})

    with_face(body)


def test_pause_and_drain_are_events() -> None:
    async def body(face: Face, driver: Driver, desk: TrainerDesk, ask: Ask) -> None:
        assert (await ask("POST", "/v1/pause", {"on": True}))[0] == 200
        assert (await ask("POST", "/v1/drain"))[0] == 200
        assert (await ask("POST", "/v1/pause", {"off": 1}))[0] == 400
        assert driver.inbox.get_nowait() == news.PauseAsked(on=True)
        assert driver.inbox.get_nowait() == news.DrainAsked()
        assert driver.inbox.empty()

    with_face(body)


def test_weights_put_there_by_hand_are_published_if_newer_and_complete() -> None:
    async def body(face: Face, driver: Driver, desk: TrainerDesk, ask: Ask) -> None:
        driver.core.version = Version(3)
        assert (await ask("POST", "/v1/publish", {"version": 3}))[0] == 409
        assert (await ask("POST", "/v1/publish", {"version": 9}))[0] == 400
        assert (await ask("POST", "/v1/publish", {"version": "new"}))[0] == 400
        assert driver.inbox.empty()
        assert (await ask("POST", "/v1/publish", {"version": 5}))[0] == 200
        assert driver.inbox.get_nowait() == news.WeightsOffered(version=Version(5))

    with_face(body)


def test_a_trainer_claims_renews_and_acknowledges() -> None:
    async def body(face: Face, driver: Driver, desk: TrainerDesk, ask: Ask) -> None:
        asked = wire.ClaimRequest(trainer="t", version=Version(0), lease_s=5.0, wait_s=0.0)
        assert await ask("POST", wire.CLAIM, asked) == (204, None)
        assert driver.inbox.empty()  # a trainer that waits is no sign that anything moves
        status, refusal = await ask("POST", wire.CLAIM, msgspec.structs.replace(asked, version=Version(2)))
        assert (status, refusal["error"]["expected"]) == (409, 0)
        batch = Batch(id=0, version=Version(0), bound=2, proofs=(), trajectories=())
        step = asyncio.ensure_future(desk.step(batch))
        await asyncio.sleep(0)
        status, claim = await ask("POST", wire.CLAIM, asked)
        assert (status, claim.batch) == (200, batch)
        assert (await ask("POST", wire.RENEW, wire.RenewRequest(lease=claim.lease, lease_s=5.0)))[0] == 200
        assert (await ask("POST", wire.RENEW, wire.RenewRequest(lease="other", lease_s=5.0)))[0] == 410
        report = StepReport(batch=0, version=Version(1), seconds=1.0)
        ack = wire.Ack(lease=claim.lease, report=report)
        assert [(await ask("POST", wire.ACK, ack))[0] for _ in range(2)] == [200, 200]
        assert await step == report
        assert (await ask("POST", wire.CLAIM, {"nonsense": 1}))[0] == 400
        await desk.aclose()
        assert (await ask("POST", wire.CLAIM, msgspec.structs.replace(asked, version=Version(1))))[0] == 410

    with_face(body)


def test_events_are_streamed_and_a_reader_that_lags_is_cut_off() -> None:
    async def body(face: Face, driver: Driver, desk: TrainerDesk, ask: Ask) -> None:
        with face.stream.reader() as queue:
            face.stream.publish(1.0, news.Tick(), [])
            line = await queue.get()
            assert line is not None
            assert json.loads(line) == {"now": 1.0, "event": {"type": "Tick"}, "commands": []}
            for _ in range(queue.maxsize + 1):
                face.stream.publish(2.0, news.Tick(), [])
            lines = [queue.get_nowait() for _ in range(queue.qsize())]
            assert lines[-1] is None

    with_face(body)


def test_the_desk_and_the_virtual_clock_agree_with_the_real_one() -> None:
    """The same desk, without a socket: a claim that finds nothing waits exactly as long as it said."""

    async def main() -> float:
        desk = TrainerDesk(Version(0), asyncio.get_running_loop().time)
        asked = wire.ClaimRequest(trainer="t", version=Version(0), lease_s=5.0, wait_s=7.0)
        assert await desk.claim(asked) is None
        return asyncio.get_running_loop().time()

    assert virtual(main()) == 7.0
