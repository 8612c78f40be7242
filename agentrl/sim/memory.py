"""Small honest stand-ins for what keeps state: sandboxes, their verifier and the journal, in memory. They keep the
ports' promises (idempotent requests, durable before acknowledged, closed means gone). For tests and examples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from agentrl.errors import DataError, SandboxLost
from agentrl.ports import Sandbox
from agentrl.records import (
    AttemptId,
    ExecResult,
    File,
    Lane,
    LaneStatus,
    SandboxHostStatus,
    Task,
    Trajectory,
    TurnPayload,
    Verdict,
)


class MemorySandbox:
    """`ports.Sandbox` whose whole state is a list of lines. Commands: `add WORD`, `show`, `count N` (exit N), `lose`
    (dies with the sandbox), `clock` (differs in each sandbox). Any other word exits 127."""

    def __init__(self, host: MemorySandboxHost, number: int) -> None:
        self.id = f"box-{number}"
        self.opened = (0.0, 0.0)
        self.lines: list[str] = []
        self.files: dict[str, bytes] = {}
        self._host = host
        self._number = number
        self._done: dict[str, ExecResult] = {}

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        request_id: str,
        lane: Lane | None = None,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        self._alive()
        await asyncio.sleep(0)
        self._alive()
        if request_id not in self._done:
            self._done[request_id] = self._run(command)
        return self._done[request_id]

    def _run(self, command: str) -> ExecResult:
        self._host.commands.append((self.id, command))
        word, _, rest = command.partition(" ")
        if word == "lose" and self._host.losses:
            self._host.losses -= 1
            self._host.live.pop(self.id)
            self._alive()
        if word in ("add", "lose"):
            self.lines.append(rest)
            return ExecResult(exit_code=0, output="")
        if word == "show":
            return ExecResult(exit_code=0, output="\n".join(self.lines))
        if word == "clock":
            return ExecResult(exit_code=0, output=str(self._number))
        if word == "count":
            return ExecResult(exit_code=int(rest), output="")
        return ExecResult(exit_code=127, output=f"{word}: not found\n")

    async def put(self, files: Mapping[str, File], *, request_id: str) -> None:
        self._alive()
        self.files |= {path: file.data for path, file in files.items()}

    async def get(self, path: str, *, limit: int = 65_536) -> bytes:
        self._alive()
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][:limit]

    async def sweep(self) -> int:
        self._alive()
        return 0

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._host.live.pop(self.id, None)

    def _alive(self) -> None:
        if self.id not in self._host.live:
            raise SandboxLost(f"{self.id}: gone")


class MemorySandboxHost:
    """`ports.SandboxHost`. live: what was opened and not closed; losses: how many `lose` commands will really lose."""

    def __init__(self, *, losses: int = 0) -> None:
        self.name = "memory"
        self.live: dict[str, MemorySandbox] = {}
        self.commands: list[tuple[str, str]] = []
        self.losses = losses
        self.refuse: list[Exception] = []
        self._requests: dict[str, MemorySandbox] = {}

    async def open(self, task: Task, *, label: str, lease_s: float, request_id: str) -> MemorySandbox:
        await asyncio.sleep(0)
        if self.refuse:
            raise self.refuse.pop(0)
        if request_id not in self._requests:
            box = MemorySandbox(self, len(self._requests))
            self._requests[request_id] = self.live[box.id] = box
        return self._requests[request_id]

    async def status(self, *, deadline_s: float) -> SandboxHostStatus:
        lanes = tuple(LaneStatus(lane=lane, cap=1, running=0, queued=0, cpus=(0,)) for lane in Lane)
        return SandboxHostStatus(
            name=self.name, backend="memory", isolation="none needed", live=len(self.live), lanes=lanes
        )

    async def aclose(self) -> None:
        self.live.clear()


@dataclass
class MemoryVerifier:
    """`ports.Verifier`. Full reward where the task's instruction is among the sandbox's lines."""

    verdicts: list[Verdict | Exception] = field(default_factory=list)

    async def grade(self, task: Task, sandbox: Sandbox, *, request_id: str) -> Verdict:
        assert isinstance(sandbox, MemorySandbox)
        await sandbox.sweep()
        await asyncio.sleep(0)
        if self.verdicts:
            verdict = self.verdicts.pop(0)
            if isinstance(verdict, Exception):
                raise verdict
            return verdict
        return Verdict(reward=float(task.instruction in sandbox.lines))


class MemoryJournal:
    """`ports.Journal`. What was recorded becomes durable at the next `flush` or `keep`; `crash` forgets the rest."""

    def __init__(self) -> None:
        self.log: list[tuple[float, bytes, bytes]] = []
        self._turns: dict[AttemptId, dict[int, bytes]] = {}
        self._trajectories: dict[AttemptId, bytes] = {}
        self._queued: list[Callable[[], object]] = []

    def record_event(self, now: float, event: bytes, commands: bytes) -> None:
        self._queued.append(lambda: self.log.append((now, event, commands)))

    def record_turn(self, attempt: AttemptId, payload: TurnPayload) -> None:
        blob = msgspec.msgpack.encode(payload)
        self._queued.append(lambda: self._turns.setdefault(attempt, {}).update({payload.turn.index: blob}))

    def forget(self, attempt: AttemptId) -> None:
        self._queued.append(lambda: self._turns.pop(attempt, None))

    def adopt(self, earlier: Sequence[AttemptId], attempt: AttemptId) -> None:
        def write() -> None:
            for old in earlier:
                if turns := self._turns.pop(old, None):
                    self._turns.setdefault(attempt, {}).update(turns)
                if blob := self._trajectories.pop(old, None):
                    kept = msgspec.structs.replace(msgspec.msgpack.decode(blob, type=Trajectory), attempt=attempt)
                    self._trajectories[attempt] = msgspec.msgpack.encode(kept)

        self._queued.append(write)

    def discard(self, attempts: Sequence[AttemptId]) -> None:
        self._queued.append(lambda: [self._trajectories.pop(attempt, None) for attempt in attempts])

    async def turns(self, attempt: AttemptId) -> list[TurnPayload]:
        await self.flush()
        blobs = self._turns.get(attempt, {})
        return [msgspec.msgpack.decode(blobs[index], type=TurnPayload) for index in sorted(blobs)]

    async def kept(self, attempt: AttemptId) -> Trajectory | None:
        await self.flush()
        blob = self._trajectories.get(attempt)
        return None if blob is None else msgspec.msgpack.decode(blob, type=Trajectory)

    async def keep(self, trajectory: Trajectory) -> None:
        blob = msgspec.msgpack.encode(trajectory)
        self._queued.append(lambda: self._trajectories.update({trajectory.attempt: blob}))
        self.forget(trajectory.attempt)
        await self.flush()

    async def flush(self) -> None:
        await asyncio.sleep(0)
        queued, self._queued = self._queued, []
        for write in queued:
            write()

    async def load(self, attempts: Sequence[AttemptId]) -> list[Trajectory]:
        found = [await self.kept(attempt) for attempt in attempts]
        if missing := [str(a) for a, trajectory in zip(attempts, found, strict=True) if trajectory is None]:
            raise DataError(f"not in the journal: {', '.join(missing)}")
        return [trajectory for trajectory in found if trajectory is not None]

    def crash(self) -> None:
        self._queued.clear()

    async def aclose(self) -> None:
        await self.flush()
