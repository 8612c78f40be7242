"""Where the screen's pictures come from: a live run, or a finished one played again. Handed in by the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from agentrl.records import AttemptId
from agentrl.runtime.status import Frame, Life


class Feed(Protocol):
    """Calls do not raise for a run that is gone: what went wrong is in the frame's note, or in the answer."""

    @property
    def name(self) -> str: ...

    @property
    def live(self) -> bool:
        """Whether the run can be paused and drained; else the playback can be."""
        ...

    async def watch(self, show: Callable[[Frame], None]) -> None:
        """Shows one frame after the other, until cancelled; returns where a recording ends."""
        ...

    async def pause(self, on: bool) -> str:
        """What to tell whoever asked."""
        ...

    async def drain(self) -> str: ...

    async def life(self, attempt: AttemptId) -> Life:
        """What the attempt has done; empty where nothing is known (yet)."""
        ...

    def play(self, *, speed: float, running: bool) -> None:
        """Of a recording: seconds of the run per second, and whether it moves. Nothing for a live run."""
        ...
