"""Small honest stand-ins for the ports, in memory: they keep the ports' promises (idempotent requests, durable before
acknowledged, cancel releases) and can be told to fail in the ways the real ones do. For tests and examples."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from agentrl.errors import DataError, DeadlineError, EngineLost, SandboxLost
from agentrl.ports import Sandbox
from agentrl.records import (
    AttemptId,
    EngineInfo,
    ExecResult,
    File,
    Lane,
    LaneStatus,
    LoadReport,
    Place,
    RankLoad,
    Reply,
    Sampling,
    SandboxHostStatus,
    Span,
    Task,
    Trajectory,
    TurnPayload,
    Verdict,
    Version,
)


class ByteTemplate:
    """A chat template over bytes: id 0..255 is that byte, the roles are special ids. GLM's shape: the token that ends a
    reply opens what follows."""

    SYSTEM, USER, ASSISTANT, OBSERVATION, END = 256, 257, 258, 259, 260
    stop_ids: tuple[int, ...] = (OBSERVATION, END)

    def opening(self, system: str, instruction: str) -> list[int]:
        return [self.SYSTEM, *self.encode(system), self.USER, *self.encode(instruction), self.ASSISTANT]

    def observation(self, text: str, *, after: int) -> list[int]:
        opened = [] if after == self.OBSERVATION else [self.OBSERVATION]
        return [*opened, *self.encode(text), self.ASSISTANT]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))


@dataclass(frozen=True)
class Say:
    """Answer with these ids, cut at the request's limit; `abort_after` tokens come back as an aborted partial and the
    next request goes on with the rest."""

    ids: tuple[int, ...]
    abort_after: int | None = None


@dataclass(frozen=True)
class Raise:
    error: Exception


class Hang:
    """Never answer; only the deadline or a cancellation ends the call."""


Act = Say | Raise | Hang


class ScriptedEngine:
    """`ports.Engine`. Answers requests in the order they come from `script`, at once. logprob: -1 for each token.

    cached_tokens: the longest prefix shared with anything computed before on that rank.
    """

    def __init__(self, name: str, script: Iterable[Act] = (), *, version: int = 0, ranks: int = 1) -> None:
        self.name = name
        self.script = deque(script)
        self.version = Version(version)
        self.prompts: list[list[int]] = []
        self.running: set[str] = set()
        self._ranks = ranks
        self._rids: set[str] = set()
        self._computed: dict[int, list[list[int]]] = {rank: [] for rank in range(ranks)}
        self._generated = 0
        self._paused = False

    async def info(self, *, deadline_s: float) -> EngineInfo:
        return EngineInfo(
            kind="embedded",
            software="scripted",
            version=self.version,
            ranks=self._ranks,
            slots=1_000,
            context_tokens=1 << 20,
            kv_tokens=1 << 20,
        )

    async def ready(self, *, deadline_s: float) -> bool:
        return not self._paused

    async def generate(
        self, rid: str, tokens: Sequence[int], sampling: Sampling, *, rank: int, deadline_s: float
    ) -> Reply:
        if len(rid) != 32 or rid in self._rids or not 0 <= rank < self._ranks:
            raise EngineLost(f"{self.name}: bad request {rid!r} for rank {rank}")
        self._rids.add(rid)
        self.prompts.append(list(tokens))
        act = self.script.popleft() if self.script else Raise(EngineLost(f"{self.name}: script is over"))
        self.running.add(rid)
        try:
            async with asyncio.timeout(deadline_s):
                if isinstance(act, Hang):
                    await asyncio.get_running_loop().create_future()
                await asyncio.sleep(0)
        except TimeoutError as exc:
            raise DeadlineError(f"{self.name}: no answer within {deadline_s:g} s") from exc
        finally:
            self.running.discard(rid)
        if isinstance(act, Raise):
            raise act.error
        assert isinstance(act, Say)
        return self._reply(tokens, act, sampling, rank)

    def _reply(self, tokens: Sequence[int], act: Say, sampling: Sampling, rank: int) -> Reply:
        if act.abort_after is None:
            said, finish = act.ids[: sampling.max_new_tokens], "stop"
            if not said or said[-1] not in sampling.stop_token_ids:
                finish = "length"
        else:
            said, finish = act.ids[: act.abort_after], "abort"
            self.script.appendleft(Say(act.ids[act.abort_after :]))
        cached = max((_shared(tokens, past) for past in self._computed[rank]), default=0)
        self._computed[rank].append([*tokens, *said][:-1])
        self._generated += len(said)
        return Reply(
            tokens=said,
            logprobs=(-1.0,) * len(said),
            spans=(Span(0, len(said), self.version),) if said else (),
            finish=finish,
            prompt_tokens=len(tokens),
            cached_tokens=min(cached, len(tokens) - 1),
            rank=rank,
        )

    async def abort(self, rid: str, *, deadline_s: float) -> None: ...

    async def loads(self, *, deadline_s: float) -> list[RankLoad]:
        return [
            RankLoad(rank=rank, running=0, waiting=0, kv_used_tokens=0, kv_total_tokens=1 << 20)
            for rank in range(self._ranks)
        ]

    async def generated_tokens(self, *, deadline_s: float) -> int:
        return self._generated

    async def stage(self, path: str, version: Version, *, deadline_s: float) -> float:
        return 0.0

    async def swap(self, path: str, version: Version, *, deadline_s: float) -> LoadReport:
        self.version = version
        return LoadReport(version=version, stage_s=0.0, pause_s=0.0)

    async def pause(self, *, deadline_s: float) -> None:
        self._paused = True

    async def resume(self, *, deadline_s: float) -> None:
        self._paused = False

    async def aclose(self) -> None: ...


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


class MovablePlacement:
    """`ports.Placement`, moved by hand."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._moved = asyncio.Event()

    def move(self, place: Place) -> None:
        self.place = place
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait_moved(self, away_from: Place, *, deadline_s: float) -> Place:
        try:
            async with asyncio.timeout(deadline_s):
                while self.place == away_from:
                    await self._moved.wait()
        except TimeoutError as exc:
            raise DeadlineError(f"no place away from {away_from} within {deadline_s:g} s") from exc
        return self.place


class MemorySandbox:
    """`ports.Sandbox` whose whole state is a list of lines. Commands: `add WORD`, `show`, `count N` (exit N), `lose`
    (dies with the sandbox), `clock` (differs in each sandbox). Any other word exits 127."""

    def __init__(self, host: MemorySandboxHost, number: int) -> None:
        self.id = f"box-{number}"
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
        self.log: list[tuple[float, bytes]] = []
        self._turns: dict[AttemptId, dict[int, bytes]] = {}
        self._trajectories: dict[AttemptId, bytes] = {}
        self._queued: list[Callable[[], object]] = []

    def record_event(self, now: float, event: bytes) -> None:
        self._queued.append(lambda: self.log.append((now, event)))

    def record_turn(self, attempt: AttemptId, payload: TurnPayload) -> None:
        blob = msgspec.msgpack.encode(payload)
        self._queued.append(lambda: self._turns.setdefault(attempt, {}).update({payload.turn.index: blob}))

    def forget(self, attempt: AttemptId) -> None:
        self._queued.append(lambda: self._turns.pop(attempt, None))

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
