"""The run's memory: one SQLite file, written by one process.

Four tables. `events` is the scheduler's input, enough to replay every decision, each with a digest of the commands
it led to, so that a replay can be compared. `turns` holds unfinished
conversations, to resume them. `trajectories` holds finished ones. `meta` says which schema and recipe they belong to.
Blobs are msgpack behind a CRC-32. Journal mode WAL with synchronous=FULL: what is acknowledged survives a power cut.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from agentrl.errors import DataError, UserError
from agentrl.journal.faults import explain, seal
from agentrl.journal.reader import SCHEMA, JournalReader
from agentrl.journal.writer import GroupCommit
from agentrl.records import AttemptId, Trajectory, TurnPayload

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, now REAL NOT NULL, payload BLOB NOT NULL, commands BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS turns (
    attempt TEXT NOT NULL, idx INTEGER NOT NULL, payload BLOB NOT NULL, PRIMARY KEY (attempt, idx));
CREATE TABLE IF NOT EXISTS trajectories (attempt TEXT PRIMARY KEY, payload BLOB NOT NULL);
"""

_encode = msgspec.msgpack.Encoder().encode


class SqliteJournal:
    """`ports.Journal`. Whoever opens it closes it; a process that dies before loses only what was not acknowledged."""

    def __init__(self, path: Path, lock_fd: int, writer: GroupCommit) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._writer = writer
        self._reader = JournalReader(path)

    @classmethod
    def open(cls, path: Path, *, recipe: str = "") -> SqliteJournal:
        """Make the journal, or open the one that is there. `recipe`: a digest of what makes two runs the same run.

        UserError where another process has it open, where the recipe is not the one it was written with, or where
        `path` cannot be written; DataError where the file is damaged.
        """
        lock_fd = _lock(path)
        try:
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                _prepare(db, path, recipe)
            except BaseException:
                db.close()
                raise
        except (sqlite3.Error, OSError) as exc:
            os.close(lock_fd)
            raise explain(path, exc) from exc
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd, GroupCommit(db, partial(explain, path)))

    def record_event(self, now: float, event: bytes, commands: bytes) -> None:
        self._writer.put(
            lambda db: db.execute(
                "INSERT INTO events (now, payload, commands) VALUES (?, ?, ?)", (now, seal(event), commands)
            )
        )

    def record_turn(self, attempt: AttemptId, payload: TurnPayload) -> None:
        self._writer.put(
            lambda db: db.execute(
                "INSERT OR REPLACE INTO turns VALUES (?, ?, ?)",
                (str(attempt), payload.turn.index, seal(_encode(payload))),
            )
        )

    def forget(self, attempt: AttemptId) -> None:
        """Queue: the turns of an attempt that was dropped are of no use any more."""
        self._writer.put(lambda db: db.execute("DELETE FROM turns WHERE attempt = ?", (str(attempt),)))

    def adopt(self, earlier: Sequence[AttemptId], attempt: AttemptId) -> None:
        """Queue: what earlier tries of the same sibling left durable is `attempt`'s, in one step."""

        def write(db: sqlite3.Connection) -> None:
            for old in earlier:
                db.execute("UPDATE OR REPLACE turns SET attempt = ? WHERE attempt = ?", (str(attempt), str(old)))
                kept = self._reader.decoded(db, old)
                if kept is not None:
                    renamed = msgspec.structs.replace(kept, attempt=attempt)
                    db.execute(
                        "INSERT OR REPLACE INTO trajectories VALUES (?, ?)", (str(attempt), seal(_encode(renamed)))
                    )
                    db.execute("DELETE FROM trajectories WHERE attempt = ?", (str(old),))

        self._writer.put(write)

    def discard(self, attempts: Sequence[AttemptId]) -> None:
        """Queue: the payloads of trained batches may go once nobody will audit them."""
        keys = [(str(attempt),) for attempt in attempts]
        self._writer.put(lambda db: db.executemany("DELETE FROM trajectories WHERE attempt = ?", keys))

    async def keep(self, trajectory: Trajectory) -> None:
        key = str(trajectory.attempt)

        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO trajectories VALUES (?, ?)", (key, seal(_encode(trajectory))))
            db.execute("DELETE FROM turns WHERE attempt = ?", (key,))

        self._writer.put(write)
        await self._writer.commit()

    async def flush(self) -> None:
        """Returns once everything queued so far is on disk. Who records faster than the disk waits here."""
        await self._writer.commit()

    async def turns(self, attempt: AttemptId) -> list[TurnPayload]:
        await self._writer.commit()
        return await asyncio.to_thread(self._reader.turns, attempt)

    async def kept(self, attempt: AttemptId) -> Trajectory | None:
        await self._writer.commit()
        return await asyncio.to_thread(self._reader.trajectory, attempt)

    async def load(self, attempts: Sequence[AttemptId]) -> list[Trajectory]:
        await self._writer.commit()
        return await asyncio.to_thread(self._reader.load, attempts)

    def events(self) -> Iterator[tuple[float, bytes, bytes]]:
        """(now, event, digest of its commands) as recorded and durable, in order. Blocking: for start-up."""
        return self._reader.events()

    @property
    def backlog(self) -> int:
        """Writes queued and not yet taken by the writer."""
        return self._writer.backlog

    @property
    def commits(self) -> int:
        return self._writer.commits

    async def aclose(self) -> None:
        """Commit what is queued and let the file go. Idempotent. Raises the failure that ended the writer, if any."""
        try:
            await asyncio.to_thread(self._writer.close)
        finally:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1


def _lock(path: Path) -> int:
    """The kernel lets the lock go with its owner, however it died: no stale lock to clean up."""
    lock = path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise UserError(f"{lock}: {exc.strerror}", hint="check the run folder and its rights") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise UserError(
            f"{path.parent}: the run is open in process {owner}",
            hint="end that process first, or choose another --run-dir",
        ) from None
    except OSError as exc:
        os.close(fd)
        raise explain(path, exc) from exc
    return fd


def _prepare(db: sqlite3.Connection, path: Path, recipe: str) -> None:
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.executescript(_TABLES)
    meta: dict[str, str] = dict(db.execute("SELECT key, value FROM meta"))
    wanted = {"schema": str(SCHEMA), "recipe": recipe}
    if not meta:
        db.executemany("INSERT INTO meta VALUES (?, ?)", wanted.items())
    elif meta.get("schema") != wanted["schema"]:
        raise DataError(
            f"{path}: schema {meta.get('schema')}, this agentrl writes {SCHEMA}",
            hint="finish the run with the agentrl that started it, or choose another --run-dir",
        )
    elif meta.get("recipe") != recipe:
        raise UserError(
            f"{path}: the run was started with another recipe",
            hint="resume with the recipe.toml in its folder, or choose another --run-dir",
        )
