"""One attempt's sandbox. When it is lost, a fresh one is brought to the same state by running the commands again."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from agentrl.errors import InfraError, ReplayDiverged, SandboxLost, UnavailableError
from agentrl.finish import finish
from agentrl.ports import Sandbox, SandboxHost, Verifier
from agentrl.records import ExecResult, Turn, Verdict
from agentrl.rollout.observation import render
from agentrl.rollout.order import Order

_RESTORES = 2
_CLOSE_S = 30.0

T = TypeVar("T")


class Workspace:
    """Opened by `open`, or by the first call that needs it. Whoever makes one closes it, whatever happened."""

    def __init__(self, host: SandboxHost, order: Order, nonce: str, history: Sequence[Turn] = ()) -> None:
        self._host = host
        self._order = order
        # A resumed run must not meet its predecessor's sandbox again: what that had already run is unknown.
        self._prefix = f"{order.attempt}.{nonce}"
        self._history = [turn for turn in history if turn.command is not None]
        self._opened = 0
        self._lost = 0
        self._box: Sandbox | None = None
        self.open_wait_s = 0.0  # of every sandbox that was opened, by its host's clock
        self.open_s = 0.0

    async def open(self) -> None:
        """TaskError where the task's set-up fails, SandboxLost or UnavailableError where the host does."""
        await self._in_box(_nothing)

    async def run(self, command: str, index: int) -> tuple[ExecResult, str]:
        """The result, and the observation it makes. A command that dies with its sandbox is run again in the next."""

        async def run(box: Sandbox) -> ExecResult:
            return await box.exec(
                command, timeout_s=self._order.task.command_timeout_s, request_id=f"{self._id}.turn{index}"
            )

        result = await self._in_box(run)
        return result, render(result, self._order.observation_chars)

    def remember(self, turn: Turn) -> None:
        """`turn` is durable: its command belongs to the state from now on."""
        if turn.command is not None:
            self._history.append(turn)

    async def grade(self, verifier: Verifier) -> Verdict:
        return await self._in_box(
            lambda box: verifier.grade(self._order.task, box, request_id=f"{self._id}.grade"),
        )

    async def close(self) -> None:
        """Give the sandbox back, even while being cancelled. Where its host does not answer, the lease ends it."""
        box, self._box = self._box, None
        if box is not None:
            with suppress(InfraError, UnavailableError, TimeoutError):
                await finish(box.close(), deadline_s=_CLOSE_S)

    @property
    def _id(self) -> str:
        return f"{self._prefix}.box{self._opened}"

    async def _in_box(self, work: Callable[[Sandbox], Awaitable[T]]) -> T:
        while True:
            try:
                return await work(self._box or await self._fresh())
            except SandboxLost:
                self._lost += 1
                await self.close()
                if self._lost > _RESTORES:
                    raise

    async def _fresh(self) -> Sandbox:
        order = self._order
        self._opened += 1
        self._box = box = await self._host.open(
            order.task, label=order.label, lease_s=order.lease_s, request_id=f"{self._id}.open"
        )
        waited_s, took_s = box.opened
        self.open_wait_s += waited_s
        self.open_s += took_s
        for turn in self._history:
            assert turn.command is not None
            result = await box.exec(
                turn.command,
                timeout_s=order.task.command_timeout_s,
                request_id=f"{self._id}.turn{turn.index}",
                lane=turn.lane,
            )
            if digest(render(result, order.observation_chars)) != turn.output_sha:
                raise ReplayDiverged(
                    f"{order.attempt}: another result of turn {turn.index} in a fresh sandbox: {turn.command!r}"
                )
        return box


def digest(observation: str) -> str:
    return hashlib.sha256(observation.encode(errors="replace")).hexdigest()


async def _nothing(box: Sandbox) -> None: ...
