import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from agentrl import wire
from agentrl.errors import AgentRLError, UnavailableError, UserError
from agentrl.records import StepReport, Version
from agentrl.train.client import LeaseLost, RunClient, RunOver, WrongVersion
from tests.toy_policy import Face, make_batch

REPORT = StepReport(batch=0, version=Version(1), seconds=1.0)


def talk(use: Callable[[RunClient, Face], Awaitable[None]], *, token: str = "secret", patience_s: float = 5.0) -> None:
    async def main() -> None:
        face = Face(1, lambda v: make_batch(id=v, version=v))
        async with face.serve() as url, RunClient(url, token, patience_s=patience_s) as run:
            await use(run, face)

    asyncio.run(main())


def test_claim_renew_ack_over() -> None:
    async def use(run: RunClient, face: Face) -> None:
        claim = await run.claim(Version(0), lease_s=5, wait_s=0)
        assert claim is not None
        assert claim.batch == make_batch()
        await run.renew(claim.lease, lease_s=5)
        await run.ack(claim.lease, REPORT)
        await run.ack("long gone", REPORT)  # idempotent by batch
        assert face.reports == [REPORT]
        with pytest.raises(RunOver):
            await run.claim(Version(1), lease_s=5, wait_s=0)

    talk(use)


def test_refusals_are_typed() -> None:
    async def use(run: RunClient, face: Face) -> None:
        with pytest.raises(WrongVersion, match="expects version 0") as refused:
            await run.claim(Version(4), lease_s=5, wait_s=0)
        assert refused.value.expected == 0
        with pytest.raises(LeaseLost):
            await run.renew("nobody's", lease_s=5)
        with pytest.raises(LeaseLost):
            await run.ack("nobody's", REPORT)

    talk(use)


def test_a_wrong_token_says_so() -> None:
    async def use(run: RunClient, face: Face) -> None:
        with pytest.raises(UserError, match="wrong token"):
            await run.claim(Version(0), lease_s=5, wait_s=0)

    talk(use, token="other")


def test_a_run_that_stays_away_is_given_up_in_time() -> None:
    async def main() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
            url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            async with RunClient(url, "t", patience_s=0.2) as run:
                with pytest.raises(UnavailableError, match="has not answered"):
                    await run.claim(Version(0), lease_s=5, wait_s=0)

    asyncio.run(main())


def test_a_run_that_comes_back_is_served_on() -> None:
    async def main() -> None:
        face = Face(1, lambda v: make_batch(id=v, version=v))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with RunClient(f"http://127.0.0.1:{port}", "secret", patience_s=10) as run, asyncio.TaskGroup() as group:
            claim = group.create_task(run.claim(Version(0), lease_s=5, wait_s=0))
            await asyncio.wait({claim}, timeout=0.1)  # at least one refused connection
            assert not claim.done()
            async with face.serve(port):
                assert await claim is not None

    asyncio.run(main())


def answering(status: int, body: bytes) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    return handle


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b"what", AgentRLError),
        (503, b"", UnavailableError),
        (200, b"\xc1", AgentRLError),
        (200, b"", AgentRLError),
    ],
)
def test_nonsense_over_a_unix_socket_is_a_typed_error(
    tmp_path: Path, status: int, body: bytes, error: type[Exception]
) -> None:
    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post(wire.CLAIM, answering(status, body))])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        try:
            async with RunClient(f"unix://{tmp_path}/s", "t", patience_s=0.1) as run:
                with pytest.raises(error):
                    await run.claim(Version(0), lease_s=5, wait_s=0)
        finally:
            await runner.cleanup()

    asyncio.run(main())
