"""The journal: what is acknowledged is there after reopening; what is wrong with the file is said with its name."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from agentrl.errors import AgentRLError, DataError, InfraError, UnavailableError, UserError
from agentrl.journal.faults import explain
from agentrl.journal.reader import SCHEMA, JournalReader
from agentrl.journal.store import SqliteJournal
from agentrl.records import TurnPayload
from tests.builders import attempt_id, trajectory, turn_payload


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "run.sqlite"


def reopened(path: Path) -> SqliteJournal:
    return SqliteJournal.open(path)


def test_what_is_written_is_there_after_reopening(path: Path) -> None:
    kept = trajectory(attempt_id(1))

    async def first() -> None:
        journal = SqliteJournal.open(path)
        for now in range(5):
            journal.record_event(float(now), b"event %d" % now, b"digest %d" % now)
        for index in range(3):
            journal.record_turn(attempt_id(1), turn_payload(index))
            journal.record_turn(attempt_id(2), turn_payload(index))
        await journal.keep(kept)
        await journal.aclose()
        await journal.aclose()

    async def second() -> None:
        journal = reopened(path)
        assert list(journal.events()) == [(float(now), b"event %d" % now, b"digest %d" % now) for now in range(5)]
        assert await journal.load([kept.attempt]) == [kept]
        assert await journal.kept(kept.attempt) == kept
        assert await journal.turns(kept.attempt) == []
        assert await journal.turns(attempt_id(2)) == [turn_payload(index) for index in range(3)]
        assert await journal.kept(attempt_id(2)) is None
        await journal.aclose()

    asyncio.run(first())
    asyncio.run(second())


def test_reads_see_everything_queued_before_them(path: Path) -> None:
    async def scenario() -> None:
        journal = SqliteJournal.open(path)
        journal.record_turn(attempt_id(), turn_payload(0))
        assert len(await journal.turns(attempt_id())) == 1
        journal.forget(attempt_id())
        assert await journal.turns(attempt_id()) == []
        await journal.keep(trajectory())
        journal.discard([attempt_id()])
        assert await journal.kept(attempt_id()) is None
        await journal.aclose()

    asyncio.run(scenario())


def test_turns_after_a_gap_are_not_a_conversation(path: Path) -> None:
    async def scenario() -> list[TurnPayload]:
        journal = SqliteJournal.open(path)
        for index in (0, 1, 3):
            journal.record_turn(attempt_id(), turn_payload(index))
        turns = await journal.turns(attempt_id())
        await journal.aclose()
        return turns

    assert [payload.turn.index for payload in asyncio.run(scenario())] == [0, 1]


def test_a_recorded_turn_again_replaces_itself(path: Path) -> None:
    async def scenario() -> None:
        journal = SqliteJournal.open(path)
        journal.record_turn(attempt_id(), turn_payload(0, reply=2))
        journal.record_turn(attempt_id(), turn_payload(0, reply=4))
        assert await journal.turns(attempt_id()) == [turn_payload(0, reply=4)]
        await journal.aclose()

    asyncio.run(scenario())


def test_many_writers_share_a_commit(path: Path) -> None:
    async def scenario() -> int:
        journal = SqliteJournal.open(path)

        async def writer(member: int) -> None:
            for index in range(5):
                journal.record_turn(attempt_id(member=member), turn_payload(index))
                await journal.flush()

        async with asyncio.TaskGroup() as group:
            for member in range(50):
                group.create_task(writer(member))
        await journal.aclose()
        return journal.commits

    assert asyncio.run(scenario()) < 125  # 250 flushes


def test_a_cancelled_waiter_harms_nobody(path: Path) -> None:
    async def scenario() -> None:
        journal = SqliteJournal.open(path)
        waiting = [asyncio.create_task(journal.keep(trajectory(attempt_id(member=m)))) for m in range(10)]
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        await asyncio.wait(waiting)
        assert [task.cancelled() for task in waiting] == [True, False] * 5
        await journal.load([attempt_id(member=m) for m in range(10)])  # queued before the cancel, so written
        await journal.aclose()

    asyncio.run(scenario())


def test_a_closed_journal_says_so(path: Path) -> None:
    async def scenario() -> None:
        journal = SqliteJournal.open(path)
        await journal.aclose()
        with pytest.raises(InfraError, match="the journal is closed"):
            journal.record_event(0.0, b"", b"")
        with pytest.raises(InfraError, match="the journal is closed"):
            await journal.flush()

    asyncio.run(scenario())


def test_a_record_that_cannot_be_written_fails_everyone_waiting_and_the_next(path: Path) -> None:
    async def scenario() -> None:
        journal = SqliteJournal.open(path)
        await journal.keep(trajectory(attempt_id(1)))
        journal.record_turn(attempt_id(2), msgspec.structs.replace(turn_payload(), reply=(object(),)))
        with pytest.raises(AgentRLError, match="could not be journalled"):
            await journal.keep(trajectory(attempt_id(3)))
        with pytest.raises(AgentRLError, match="could not be journalled"):
            journal.record_event(0.0, b"", b"")
        with pytest.raises(AgentRLError, match="could not be journalled"):
            await journal.aclose()

    async def after() -> None:
        journal = reopened(path)
        assert await journal.kept(attempt_id(1)) is not None
        assert await journal.kept(attempt_id(3)) is None
        await journal.aclose()

    asyncio.run(scenario())
    asyncio.run(after())


# --- whose run it is -------------------------------------------------------------------------------------------------


def test_a_second_owner_is_refused_and_told_who_has_it(path: Path) -> None:
    holder = (
        "import sys, pathlib; from agentrl.journal.store import SqliteJournal;"
        "journal = SqliteJournal.open(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=f"the run is open in process {process.pid}"):
            SqliteJournal.open(path)
        assert JournalReader(path).meta()["schema"] == str(SCHEMA)  # reading is free
        process.kill()
    asyncio.run(reopened(path).aclose())  # the lock went with its owner


def test_another_recipe_is_another_run(path: Path) -> None:
    asyncio.run(SqliteJournal.open(path, recipe="abc").aclose())
    with pytest.raises(UserError, match="another recipe"):
        SqliteJournal.open(path, recipe="abd")
    asyncio.run(SqliteJournal.open(path, recipe="abc").aclose())


def test_another_schema_is_refused(path: Path) -> None:
    asyncio.run(SqliteJournal.open(path).aclose())
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '999' WHERE key = 'schema'")
    db.close()
    with pytest.raises(DataError, match="schema 999"):
        SqliteJournal.open(path)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_no_journal(path: Path) -> None:
    with pytest.raises(UserError, match="no journal here"):
        list(JournalReader(path).events())


def test_a_file_that_is_no_journal_is_named(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(DataError, match=r"run\.sqlite: the journal is damaged"):
        SqliteJournal.open(path)
    with pytest.raises(DataError, match=r"run\.sqlite: the journal is damaged"):
        SqliteJournal.open(path)  # the first refusal kept no lock


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run\.lock"):
        SqliteJournal.open(tmp_path / "file" / "run.sqlite")
    (tmp_path / "run.sqlite").mkdir()
    with pytest.raises(UserError, match=r"run\.sqlite: cannot be opened"):
        SqliteJournal.open(tmp_path / "run.sqlite")


@pytest.mark.parametrize("table", ["turns", "trajectories", "events"])
def test_a_flipped_bit_is_found_before_it_is_trained_on(path: Path, table: str) -> None:
    async def write() -> None:
        journal = SqliteJournal.open(path)
        journal.record_event(0.0, b"an event", b"")
        journal.record_turn(attempt_id(2), turn_payload())
        await journal.keep(trajectory(attempt_id(1)))
        await journal.aclose()

    asyncio.run(write())
    db = sqlite3.connect(path)
    [(row, blob)] = db.execute(f"SELECT rowid, payload FROM {table}").fetchall()
    db.execute(f"UPDATE {table} SET payload = ? WHERE rowid = ?", (blob[:-1] + bytes([blob[-1] ^ 1]), row))
    db.commit()
    db.close()
    reader = JournalReader(path)
    read = {
        "turns": lambda: reader.turns(attempt_id(2)),
        "trajectories": lambda: reader.load([attempt_id(1)]),
        "events": lambda: list(reader.events()),
    }[table]
    with pytest.raises(
        DataError, match=r"run\.sqlite: (turn 0 of g2|trajectory g1|event 1).* does not match its checksum"
    ):
        read()


def test_a_missing_trajectory_is_named(path: Path) -> None:
    asyncio.run(SqliteJournal.open(path).aclose())
    with pytest.raises(DataError, match=r"trajectory g7\.m0\.t0 is not in the journal"):
        JournalReader(path).load([attempt_id(7)])


@pytest.mark.parametrize(
    ("exc", "error", "words"),
    [
        (OSError(28, "No space left on device"), UnavailableError, "no space left"),
        (sqlite3.OperationalError("disk I/O error"), DataError, "could not be written"),
        (PermissionError(13, "denied"), DataError, "could not be written"),
        (TypeError("boom"), AgentRLError, "could not be journalled"),
    ],
)
def test_every_fault_has_a_remedy(path: Path, exc: Exception, error: type[AgentRLError], words: str) -> None:
    told = explain(path, exc)
    assert type(told) is error
    assert words in str(told)
    assert told.hint
