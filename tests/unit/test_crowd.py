"""The crowd that `agentrl bench watch` measures is a run like any other: its turns, its trace, its face."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from agentrl.wiring.crowd import crowd


def test_a_crowd_is_watched(tmp_path: Path) -> None:
    async def main() -> None:
        async with crowd(tmp_path, attempts=64, turns_per_s=1_000, watched=True) as made:
            driving = asyncio.ensure_future(made.drive())
            async with asyncio.timeout(30):
                assert (await made.bound).startswith("http://127.0.0.1:")
                assert made.face is not None
                with made.face.stream.reader() as events:
                    while made.driver.core.ledger.ended < 20:
                        assert await events.get()
            assert made.face.metrics is not None
            assert made.turns > 50
            assert made.face.picture().attempts == 64
            assert b"agentrl_turn_seconds_count" in made.face.metrics.now()()
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)

    asyncio.run(main())
    assert any(e.get("name") == "tool" for e in json.loads((tmp_path / "trace.json").read_text()))
