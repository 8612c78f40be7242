"""The two feeds of `agentrl top`: a live run through its HTTP face, and a finished one out of its journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import AgentRLError, UnavailableError
from agentrl.journal.reader import JournalReader
from agentrl.records import AttemptId
from agentrl.runtime.recent import Recent
from agentrl.runtime.status import Frame, Life, Status, picture
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.wiring.attach import FaceClient
from agentrl.wiring.reach import Look
from agentrl.wiring.recording import policy_in

_LEAST_S = 1.0  # between two pictures of a live run, however much happens
_SHARE = 0.03  # of a core for the screen: what a picture of thousands of attempts cost, the next one waits for
_LONGEST_S = 4.0
_MOST_S = 2.0  # where nothing does: waits grow all the same
_PLAY_S = 0.5  # between two pictures of a recording
_NEWS = 500  # of a recording, between two pictures


class LiveFeed:
    """`face` is opened and closed by whoever made it. look: where the run is now. folder: the run's, empty where it is
    on another machine."""

    live = True

    def __init__(self, name: str, face: FaceClient, look: Look, folder: str = "") -> None:
        self.name = name
        self._face = face
        self._look = look
        self._folder = folder
        self._heard: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    async def watch(self, show: Callable[[Frame], None]) -> None:
        """A picture soon after something happened, now and then where nothing does. A run that is over is waited for:
        it may be resumed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="events of the run")
            await self._draw(show)

    async def _draw(self, show: Callable[[Frame], None]) -> None:
        status: Status | None = None
        cost_s = 0.0  # CPU of the last picture, drawing included
        while True:
            note, spent_s = "", time.process_time()
            try:
                status = msgspec.convert(await self._face.status(), Status)
            except UnavailableError as exc:
                if status is not None:
                    show(self._gone(status, exc))
                await self._back()
                continue
            except (AgentRLError, msgspec.ValidationError) as exc:  # busy: it may answer again; or of another version
                note = str(exc)
            if status is not None:
                show(Frame(status=status, news=self._taken(), note=note))
            await self._until_news(max(_LEAST_S, min(_LONGEST_S, cost_s / _SHARE)))
            cost_s = time.process_time() - spent_s

    def _gone(self, last: Status, exc: UnavailableError) -> Frame:
        """What is to be said of a run that answers no more."""
        outcome, why = ("away", str(exc)) if not self._folder else _end_of(Path(self._folder))
        note = f"play it: agentrl top {self._folder} --replay" if self._folder else "tried again until it answers"
        return Frame(
            status=msgspec.structs.replace(last, outcome=outcome, blockers=why, loop_lag_s=0.0),
            news=self._taken(),
            note=note,
        )

    async def _back(self) -> None:
        """Once it answers again, from wherever."""
        while True:
            await asyncio.sleep(_MOST_S)
            with suppress(AgentRLError):
                self._face.move(await self._look())
                await self._face.versions()
                return

    def _taken(self) -> tuple[dict[str, Any], ...]:
        taken, self._heard = self._heard, []
        return tuple(taken)

    async def _until_news(self, least_s: float) -> None:
        await asyncio.sleep(least_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, _MOST_S - least_s)):
                await self._news.wait()
        self._news.clear()

    async def _listen(self) -> None:
        """The stream is opened again where it ends: a reader that lags is cut off. `_draw` notices a run's end."""
        while True:
            with suppress(AgentRLError):
                async with aclosing(self._face.events()) as events:
                    async for said in events:
                        if said:
                            self._heard.append(said)
                            self._news.set()
            self._news.set()
            await asyncio.sleep(_MOST_S)

    async def pause(self, on: bool) -> str:
        try:
            await self._face.pause(on)
        except AgentRLError as exc:
            return str(exc)
        return "paused: nothing new starts" if on else "goes on"

    async def drain(self) -> str:
        try:
            await self._face.drain()
        except AgentRLError as exc:
            return str(exc)
        return "it drains"

    async def life(self, attempt: AttemptId) -> Life:
        if self._folder:
            return await asyncio.to_thread(life_of, JournalReader(Path(self._folder) / "run.sqlite"), attempt)
        with suppress(AgentRLError, msgspec.ValidationError):
            return msgspec.convert(await self._face.life(attempt), Life)
        return Life()

    def play(self, *, speed: float, running: bool) -> None:
        """A live run has its own pace."""


def _end_of(folder: Path) -> tuple[str, str]:
    """Outcome and why, as the run left them behind."""
    try:
        summary = msgspec.json.decode((folder / "summary.json").read_bytes())
        outcome, why = str(summary["outcome"]), str(summary["detail"])
    except (OSError, msgspec.DecodeError, KeyError):
        outcome, why = "running", ""
    if outcome == "running":
        return "killed", "its process is gone; the same `agentrl run` with its folder goes on"
    return outcome, why


class Recording:
    """A run's journal through a fresh core, played at any speed. UserError where the folder holds no run."""

    live = False

    def __init__(self, folder: Path, *, until: float = 0.0) -> None:
        """until: the first picture's time, in seconds of the run's clock; infinity: its end."""
        self._policy = policy_in(folder)
        self.name = folder.resolve().name
        self._journal = JournalReader(folder / "run.sqlite")
        self._until = until
        self._speed = 1.0
        self._going = asyncio.Event()

    def play(self, *, speed: float, running: bool) -> None:
        self._speed = speed
        if running:
            self._going.set()
        else:
            self._going.clear()

    async def watch(self, show: Callable[[Frame], None]) -> None:
        """One every half a second, of as much of the run as `speed` says. At least one."""
        events = self._journal.events()
        playing = _Playing(Core(self._policy), Recent(), events)
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "recording") as thread:  # one: a connection to SQLite stays on its thread
            try:
                now = await loop.run_in_executor(thread, playing.forward, self._until)
                while not playing.ended:
                    show(playing.shown(now))
                    await asyncio.sleep(_PLAY_S)
                    await self._going.wait()
                    now = await loop.run_in_executor(thread, playing.forward, now + _PLAY_S * self._speed)
                show(playing.shown(playing.at, note="the recording ends here"))
            finally:
                thread.submit(events.close)

    async def pause(self, on: bool) -> str:
        return "a recording: space stops and goes"

    async def drain(self) -> str:
        return "a recording: the run is over"

    async def life(self, attempt: AttemptId) -> Life:
        return await asyncio.to_thread(life_of, self._journal, attempt)


class _Playing:
    """Blocking; one thread at a time."""

    def __init__(self, core: Core, recent: Recent, events: Iterator[tuple[float, bytes, bytes]]) -> None:
        self.core = core
        self.at = 0.0
        self.ended = False
        self._recent = recent
        self._events = events
        self._next: tuple[float, bytes, bytes] | None = None
        self._news: list[dict[str, Any]] = []

    def forward(self, until: float) -> float:
        """Everything that happened up to then."""
        while not self.ended and (self._next is None or self._next[0] <= until):
            if self._next is not None:
                self._handle(*self._next[:2])
            self._next = next(self._events, None)
            self.ended = self._next is None
        return until

    def _handle(self, now: float, data: bytes) -> None:
        event = news.decode(data)
        commands = self.core.handle(event, now)
        self._recent.heard(now, event, commands, self.core)
        self.at = now
        self._news.append(_said(now, event, commands))
        del self._news[:-_NEWS]

    def shown(self, now: float, note: str = "") -> Frame:
        said, self._news = self._news, []
        return Frame(status=picture(self.core, now, self._recent), news=tuple(said), note=note)


def _said(now: float, event: news.Event, commands: list[orders.Command]) -> dict[str, Any]:
    """As on the wire."""
    return {"now": now, "event": msgspec.to_builtins(event), "commands": msgspec.to_builtins(commands)}


def life_of(journal: JournalReader, attempt: AttemptId) -> Life:
    """Of the attempt, kept or on its way; empty where the journal has none or cannot be read now. Blocking."""
    with suppress(AgentRLError, OSError):
        kept = journal.trajectory(attempt)
        if kept is None:
            return Life(turns=tuple(payload.turn for payload in journal.turns(attempt)))
        return Life(
            turns=kept.turns,
            open_wait_s=kept.open_wait_s,
            open_s=kept.open_s,
            verify_wait_s=kept.verdict.queue_s,
            verify_s=kept.verdict.verify_s,
            ended_s=kept.ended_s,
        )
    return Life()
