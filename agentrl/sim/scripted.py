"""Small honest stand-ins for what talks: an engine that answers from a script, a placement moved by hand, a template
over bytes. They keep the ports' promises and fail, when told to, as the real ones do. For tests and examples."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentrl.errors import DeadlineError, EngineLost
from agentrl.records import (
    EngineInfo,
    LoadReport,
    Place,
    RankLoad,
    Reply,
    Sampling,
    Span,
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


@dataclass(frozen=True)
class Meanwhile:
    """Do something to the world when the request comes, then act."""

    happens: Callable[[], object]
    act: Say | Raise | Hang


Act = Say | Raise | Hang | Meanwhile


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
        if isinstance(act, Meanwhile):
            act.happens()
            act = act.act
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
            if rest := act.ids[act.abort_after :]:
                self.script.appendleft(Say(rest))
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

    async def swap(
        self, path: str, version: Version, *, deadline_s: float, regenerate: bool = False, grace_s: float = 0.0
    ) -> LoadReport:
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
        self._wanted = asyncio.Event()

    async def waited_for(self) -> None:
        """Returns once somebody waits to be moved."""
        await self._wanted.wait()

    def move(self, place: Place) -> None:
        self.place = place
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait_moved(self, away_from: Place, *, deadline_s: float) -> Place:
        self._wanted.set()
        try:
            async with asyncio.timeout(deadline_s):
                while self.place == away_from:
                    await self._moved.wait()
        except TimeoutError as exc:
            raise DeadlineError(f"no place away from {away_from} within {deadline_s:g} s") from exc
        return self.place
