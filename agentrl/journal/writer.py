"""Group commit: one thread owns the write connection, takes all that is queued, commits once, answers all waiters.

One fsync serves everyone who queued while the last one ran, so throughput rises with load and latency stays that of
about two commits. The first failure ends the writer: what was acknowledged is on disk, everything after is refused
with the same error, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress

from agentrl.errors import AgentRLError, InfraError

Write = Callable[[sqlite3.Connection], object]
"""Runs inside the transaction, on the writer's thread. It encodes there too, off the event loop."""

_JOIN_S = 60.0


class GroupCommit:
    """Closes `connection` when it ends. `explain` turns what SQLite raised into a typed error."""

    def __init__(self, connection: sqlite3.Connection, explain: Callable[[BaseException], AgentRLError]) -> None:
        self._connection = connection
        self._explain = explain
        self._changed = threading.Condition()
        self._writes: list[Write] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._closing = False
        self._failure: AgentRLError | None = None
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    def put(self, write: Write) -> None:
        """Queue; never blocks. Raises the failure that ended the writer."""
        with self._changed:
            self._check_open()
            self._writes.append(write)
            self._changed.notify()

    async def commit(self) -> None:
        """Returns once everything queued before this call is on disk."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check_open()
            self._waiters.append(waiter)
            self._changed.notify()
        await waiter

    @property
    def backlog(self) -> int:
        return len(self._writes)

    def close(self) -> None:
        """Commit what is queued, then end the thread. Blocks; idempotent. Raises the failure if there was one."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise InfraError(f"the journal's last commit did not end within {_JOIN_S:.0f} s", hint="check the disk")
        if self._failure:
            raise self._failure

    def _check_open(self) -> None:
        if self._failure:
            raise self._failure
        if self._closing:
            raise InfraError("the journal is closed")

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._writes or self._waiters or self._closing)
                    writes, self._writes = self._writes, []
                    waiters, self._waiters = self._waiters, []
                if not writes and not waiters:
                    return
                failure = self._commit(writes) if writes else None
                if failure:
                    with self._changed:
                        self._failure = failure
                        waiters += self._waiters
                _answer(waiters, failure)
                if failure:
                    return
        finally:
            self._connection.close()

    def _commit(self, writes: list[Write]) -> AgentRLError | None:
        # Whatever is raised here, a record that does not encode included, must reach the waiters.
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for write in writes:
                write(self._connection)
            self._connection.execute("COMMIT")
        except BaseException as exc:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            return self._explain(exc)
        self.commits += 1
        return None


def _answer(waiters: list[asyncio.Future[None]], failure: AgentRLError | None) -> None:
    def resolve(waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            if waiter.done():  # the caller was cancelled
                continue
            if failure:
                waiter.set_exception(failure)
            else:
                waiter.set_result(None)

    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, theirs in by_loop.items():
        with suppress(RuntimeError):  # that loop was closed: nobody is left to answer
            loop.call_soon_threadsafe(resolve, theirs)
