"""The process that broadcasts versions to engines (`train.worker.broadcast`), and orders to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agentrl.errors import DeadlineError, UnavailableError
from agentrl.recipe.schema import Recipe

_END_S = 5.0
_LEAVE_S = 5.0


class SenderProcess:
    """`serve.broadcast.Sender`. Started with its first order, again with the next one after it died; it ends with us,
    however we end. address: of this machine, as engines reach it. log: where it says what went wrong."""

    def __init__(self, *, address: str, backend: str, log: Path) -> None:
        self.address = address
        self.backend = backend
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def open(self, group: str, *, deadline_s: float) -> int:
        return int(await self._order("open", deadline_s, group=group))

    async def join(self, group: str, members: int, *, deadline_s: float) -> None:
        await self._order("join", deadline_s, group=group, members=members)

    async def send(self, group: str, path: str, names: list[str], *, deadline_s: float) -> None:
        await self._order("send", deadline_s, group=group, path=path, names=names)

    async def leave(self, group: str) -> None:
        """Best effort: with the process its groups are gone as well."""
        if self._process is not None:
            with contextlib.suppress(UnavailableError, DeadlineError):
                await self._order("leave", _LEAVE_S, group=group)

    async def aclose(self) -> None:
        process, self._process = self._process, None
        if process is None or self._reading is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        await self._reading

    async def _order(self, do: str, deadline_s: float, **order: Any) -> Any:
        process = await self._running()
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "do": do, "deadline_s": deadline_s, **order})
        try:
            assert process.stdin is not None
            process.stdin.write(line.encode() + b"\n")
            async with asyncio.timeout(deadline_s):
                said = await answer
        except TimeoutError as exc:
            raise DeadlineError(f"weights' sender: {do} took more than {deadline_s:.0f} s", hint=self._hint) from exc
        except OSError as exc:
            raise UnavailableError(f"weights' sender: {exc}", hint=self._hint) from exc
        finally:
            self._open.pop(number, None)
        if "error" in said:
            raise UnavailableError(f"weights' sender: {do}: {said['error']}", hint=self._hint)
        return said["value"]

    @property
    def _hint(self) -> str:
        return f"see {self._log}"

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                argv = [sys.executable, "-m", "agentrl.train.worker.broadcast", self.address, self.backend]
                with self._log.open("ab") as log:
                    self._process = await asyncio.create_subprocess_exec(
                        *argv,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C asks the run to drain, which still publishes
                    )
                self._reading = asyncio.create_task(self._read(self._process), name="weights' sender")
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            waiting = self._open.get(said["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(said)
        code = await process.wait()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(UnavailableError(f"weights' sender ended with code {code}", hint=self._hint))


@contextlib.asynccontextmanager
async def sender_of(recipe: Recipe, folder: Path) -> AsyncIterator[SenderProcess | None]:
    """The sender of the run in `folder`; None where engines read weights from the disk."""
    publish = recipe.publish
    if publish.transfer == "disk":
        yield None
        return
    sender = SenderProcess(address=publish.address, backend=publish.backend, log=folder / "logs" / "sender.log")
    try:
        yield sender
    finally:
        await sender.aclose()
