"""Reading a run's journal: for resume, for replay, for reports. Also while a run writes it."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl.errors import DataError, UserError
from agentrl.journal.faults import explain, unseal
from agentrl.records import AttemptId, Trajectory, TurnPayload

SCHEMA = 2

T = TypeVar("T")

_turn = msgspec.msgpack.Decoder(TurnPayload)
_trajectory = msgspec.msgpack.Decoder(Trajectory)


class JournalReader:
    """Blocking calls, each on its own read-only connection. UserError where there is no journal at `path`, DataError
    where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def meta(self) -> dict[str, str]:
        with self._connected() as db:
            return dict(db.execute("SELECT key, value FROM meta"))

    def events(self) -> Generator[tuple[float, bytes, bytes], None, None]:
        """(now, event as recorded, digest of the commands it led to), in order."""
        with self._connected() as db:
            for seq, now, blob, commands in db.execute("SELECT seq, now, payload, commands FROM events ORDER BY seq"):
                yield now, unseal(self.path, f"event {seq}", blob), commands

    def turns(self, attempt: AttemptId) -> list[TurnPayload]:
        """The durable turns of an unfinished attempt, from 0, without a gap."""
        with self._connected() as db:
            rows = db.execute("SELECT idx, payload FROM turns WHERE attempt = ? ORDER BY idx", (str(attempt),))
            return [
                self._decode(_turn, f"turn {index} of {attempt}", blob)
                for place, (index, blob) in enumerate(rows)
                if place == index
            ]

    def trajectory(self, attempt: AttemptId) -> Trajectory | None:
        """The kept trajectory, None where the attempt has not ended."""
        with self._connected() as db:
            return self.decoded(db, attempt)

    def decoded(self, db: sqlite3.Connection, attempt: AttemptId) -> Trajectory | None:
        """The same, on a connection that is open already."""
        row = db.execute("SELECT payload FROM trajectories WHERE attempt = ?", (str(attempt),)).fetchone()
        return None if row is None else self._decode(_trajectory, f"trajectory {attempt}", row[0])

    def load(self, attempts: Sequence[AttemptId]) -> list[Trajectory]:
        """In the order asked. DataError where one is missing or damaged."""
        found = []
        for attempt in attempts:
            trajectory = self.trajectory(attempt)
            if trajectory is None:
                raise DataError(f"{self.path}: trajectory {attempt} is not in the journal")
            found.append(trajectory)
        return found

    def _decode(self, decoder: msgspec.msgpack.Decoder[T], what: str, blob: bytes) -> T:
        try:
            return decoder.decode(unseal(self.path, what, blob))
        except msgspec.DecodeError as exc:
            raise DataError(f"{self.path}: {what} does not match its schema ({exc})") from exc

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if not self.path.is_file():
            raise UserError(f"{self.path}: no journal here", hint="name the folder of a run, e.g. runs/local")
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                yield db
        except sqlite3.Error as exc:
            raise explain(self.path, exc) from exc
