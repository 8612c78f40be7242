"""An engine client that its supervisor closes while others still use it: they hear that the engine is lost."""

from __future__ import annotations

import asyncio

from agentrl.errors import EngineLost
from agentrl.serve.sglang import SGLangEngine


def test_every_call_of_a_closed_client_is_a_lost_engine() -> None:
    async def check() -> None:
        asked = asyncio.Event()

        async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            asked.set()
            await reader.read()  # until the client goes
            writer.close()

        async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            engine = SGLangEngine("e0", f"http://127.0.0.1:{port}", "token")
            async with asyncio.timeout(20):
                waiting = asyncio.ensure_future(engine.loads(deadline_s=10))
                await asked.wait()
                closing = asyncio.ensure_future(engine.aclose())
                during = [asyncio.ensure_future(engine.loads(deadline_s=10)) for _ in range(3)]
                await closing
                after = asyncio.ensure_future(engine.loads(deadline_s=10))
                said = await asyncio.gather(waiting, *during, after, return_exceptions=True)
        assert [type(answer) for answer in said] == [EngineLost] * 5

    asyncio.run(check())
