"""Whether an engine that answers also works: by what it says of itself, question after question. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.records import RankLoad


@dataclass(kw_only=True)
class Stuck:
    """stuck_s: for so long an engine with running requests may show no new token and no change of its load (a long
    prompt is computed in pieces, which its load shows). unready_s: for so long it may not be ready, as while it is
    paused for new weights. 0: for ever."""

    stuck_s: float = 0.0
    unready_s: float = 0.0

    def __post_init__(self) -> None:
        self._seen: object = None
        self._moved: float | None = None
        self._ready: float | None = None

    def look(self, now: float, *, ready: bool, loads: Sequence[RankLoad], tokens: int) -> str:
        """Why it must be given up; empty: it works. now: seconds, of any steady clock."""
        if ready or self._ready is None:
            self._ready = now
        seen = (tuple(loads), tokens)
        working = any(load.running or load.waiting for load in loads)
        if seen != self._seen or not (ready and working) or self._moved is None:
            self._seen, self._moved = seen, now
        if self.stuck_s and now - self._moved >= self.stuck_s:
            running = sum(load.running + load.waiting for load in loads)
            return f"{running} requests run, no token for {now - self._moved:.0f} s: it answers and does not work"
        if self.unready_s and now - self._ready >= self.unready_s:
            return f"not ready for {now - self._ready:.0f} s"
        return ""
