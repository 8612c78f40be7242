"""What every journal keeps to: the SQLite one, and the in-memory one that tests of other parts trust."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from agentrl.errors import DataError
from agentrl.journal.store import SqliteJournal
from agentrl.ports import Journal
from agentrl.sim.memory import MemoryJournal
from tests.builders import attempt_id, trajectory, turn_payload

OLD, NEW = attempt_id(attempt=0), attempt_id(attempt=1)

Check = Callable[[Journal], Awaitable[None]]


async def keep_and_load(journal: Journal) -> None:
    kept = [trajectory(attempt_id(member=m), reply=m + 1) for m in range(3)]
    for one in kept:
        await journal.keep(one)
    assert await journal.load([one.attempt for one in reversed(kept)]) == kept[::-1]
    assert await journal.kept(kept[0].attempt) == kept[0]
    assert await journal.kept(attempt_id(9)) is None


async def a_missing_one_is_an_error(journal: Journal) -> None:
    await journal.keep(trajectory(OLD))
    with pytest.raises(DataError, match=r"g9\.m0\.t0"):
        await journal.load([OLD, attempt_id(9)])


async def turns_are_there_until_kept_or_forgotten(journal: Journal) -> None:
    for index in range(3):
        for attempt in (OLD, attempt_id(2), attempt_id(3)):
            journal.record_turn(attempt, turn_payload(index))
    await journal.keep(trajectory(OLD))
    journal.forget(attempt_id(2))
    assert await journal.turns(OLD) == await journal.turns(attempt_id(2)) == []
    assert await journal.turns(attempt_id(3)) == [turn_payload(index) for index in range(3)]


async def the_same_twice_is_once(journal: Journal) -> None:
    for _ in range(2):
        journal.record_turn(OLD, turn_payload(0))
    assert await journal.turns(OLD) == [turn_payload(0)]
    for _ in range(2):
        await journal.keep(trajectory(OLD))
    assert await journal.load([OLD]) == [trajectory(OLD)]


async def a_new_try_adopts_the_turns_of_the_old(journal: Journal) -> None:
    for index in range(2):
        journal.record_turn(OLD, turn_payload(index))
    journal.adopt([OLD], NEW)
    journal.record_turn(NEW, turn_payload(2))
    assert await journal.turns(NEW) == [turn_payload(index) for index in range(3)]
    assert await journal.turns(OLD) == []


async def a_new_try_adopts_what_was_already_kept(journal: Journal) -> None:
    await journal.keep(trajectory(OLD))
    journal.adopt([attempt_id(5), OLD], NEW)
    assert await journal.kept(NEW) == msgspec.structs.replace(trajectory(OLD), attempt=NEW)
    assert await journal.kept(OLD) is None


async def discarded_payloads_are_gone(journal: Journal) -> None:
    await journal.keep(trajectory(OLD))
    await journal.keep(trajectory(NEW))
    journal.discard([OLD, attempt_id(9)])
    await journal.flush()
    assert await journal.kept(OLD) is None
    assert await journal.kept(NEW) is not None


CHECKS: list[Check] = [
    keep_and_load,
    a_missing_one_is_an_error,
    turns_are_there_until_kept_or_forgotten,
    the_same_twice_is_once,
    a_new_try_adopts_the_turns_of_the_old,
    a_new_try_adopts_what_was_already_kept,
    discarded_payloads_are_gone,
]


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_journal(tmp_path: Path, kind: str, check: Check) -> None:
    async def scenario() -> None:
        journal = SqliteJournal.open(tmp_path / "run.sqlite") if kind == "sqlite" else MemoryJournal()
        try:
            await check(journal)
        finally:
            await journal.aclose()

    asyncio.run(scenario())
