"""The trainer process: claim, step, save, checkpoint, acknowledge; then again, until the run is over.

The event loop keeps the lease alive while one thread runs torch. A kill at any moment loses at most the step in
progress: what is on disk is complete or absent, and a step that was saved but not acknowledged is acknowledged, not
repeated, by the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

from agentrl import lifeline, wire
from agentrl.errors import DeadlineError, UserError
from agentrl.records import StepReport, Version
from agentrl.train.client import LeaseLost, RunClient, RunOver, WrongVersion
from agentrl.train.config import WorkerConfig
from agentrl.train.worker.exchange import Exchange, RemoteExchange, SharedDisk
from agentrl.train.worker.session import Session, Store

_T = TypeVar("_T")
_LOST_LEASES = 5  # in a row: the run does not honour what it hands out


async def run(config: WorkerConfig, open_store: Callable[[str], Store]) -> None:
    """Returns when the run is over. Ends at SIGTERM, SIGINT and the end of the lifeline with CancelledError."""
    this = cast(asyncio.Task[None], asyncio.current_task())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _cancel, this)
    if config.lifeline:
        lifeline.install(functools.partial(_cancel, this))
    client = RunClient(config.url, _token(config), trainer=config.name, patience_s=config.reconnect_s)
    async with client:
        store = await asyncio.to_thread(open_store, config.weights)
        exchange = RemoteExchange(config, client, store) if config.remote else SharedDisk()
        await Trainer(config, client, exchange).serve(store)


class Trainer:
    """One session on one thread, one client on the loop."""

    def __init__(self, config: WorkerConfig, client: RunClient, exchange: Exchange) -> None:
        self._config = config
        self._client = client
        self._exchange = exchange
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._lost = 0

    async def serve(self, store: Store) -> None:
        start = await self._exchange.start()
        session = await self._call(lambda: Session(self._config, store, start))
        _say(f"ready at version {session.version}")
        await self._settle(session)
        speaks_for = session.version
        refused: Version | None = None
        while True:
            try:
                claim = await self._client.claim(speaks_for, lease_s=self._config.lease_s, wait_s=self._config.wait_s)
            except RunOver:
                return
            except WrongVersion as exc:
                if exc.expected is None or exc.expected == refused:
                    raise
                speaks_for = refused = exc.expected
                continue
            refused = None
            if claim is not None:
                await self._work(session, claim)
                speaks_for = session.version

    async def _settle(self, session: Session) -> None:
        """A step that was saved before the last process died, and perhaps not acknowledged."""
        if session.last is not None:
            with contextlib.suppress(LeaseLost):
                await self._acknowledge(session.last.lease, session.last.report)

    async def _work(self, session: Session, claim: wire.Claim) -> None:
        report = session.answer(claim.batch)
        try:
            if report is None:
                if await self._while_renewing(claim.lease, self._exchange.bring(claim.batch.version)):
                    await self._call(session.replaced, claim.batch.version)
                report = await self._step(session, claim)
            await self._acknowledge(claim.lease, report)
        except LeaseLost as exc:
            self._lost += 1
            if self._lost >= _LOST_LEASES:
                raise
            _say(f"batch {claim.batch.id}: {exc}")
            await self._call(int)  # the thread has left the abandoned step; the next claim says where the run stands
            return
        self._lost = 0
        named = ("loss", "grad_norm", "logprob_gap_mean", "reward_mean")
        figures = {k: round(report.metrics[k], 6) for k in named if k in report.metrics}
        _say(f"version {report.version}: batch {report.batch} in {report.seconds:.2f} s {figures}")

    async def _acknowledge(self, lease: str, report: StepReport) -> None:
        await self._while_renewing(lease, self._exchange.give(lease, report.version))
        await self._client.ack(lease, report)

    async def _step(self, session: Session, claim: wire.Claim) -> StepReport:
        """DeadlineError after step_timeout_s, LeaseLost where the lease went; both abandon the step."""
        stop, limit = threading.Event(), self._config.train.step_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._while_renewing(
                    claim.lease, self._call(session.train, claim.lease, claim.batch, stop)
                )
        except TimeoutError as exc:
            raise DeadlineError(f"batch {claim.batch.id}: the step did not end within {limit:.0f} s") from exc
        finally:
            stop.set()

    async def _while_renewing(self, lease: str, work: Awaitable[_T]) -> _T:
        try:
            async with asyncio.TaskGroup() as group:
                renewal = group.create_task(self._renew(lease), name=f"renew {lease}")
                result = await work
                renewal.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return result

    async def _renew(self, lease: str) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            await self._client.renew(lease, lease_s=self._config.lease_s)

    async def _call(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(work, *args))


def _token(config: WorkerConfig) -> str:
    try:
        return Path(config.token_file).read_text().strip()
    except OSError as exc:
        hint = "`agentrl run` writes it into the run's folder."
        raise UserError(f"{config.token_file}: no token: {exc.strerror}", hint=hint) from exc


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _say(line: str) -> None:
    print(f"trainer: {line}", file=sys.stderr, flush=True)  # noqa: T201
