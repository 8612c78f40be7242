"""A Chrome trace, one event a line, readable at any moment: Perfetto and chrome://tracing accept a missing end.

Tracks: each attempt (its turns: queue, prefill, decode, tool), each engine's weight changes, the trainer's steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from agentrl.records import AttemptId, Batch, StepReport, Trajectory, Turn, Version

_ATTEMPTS, _ENGINES, _TRAINER = 1, 2, 3


class Trace:
    """Append-only; the caller closes it. Times in seconds of the run's clock, microseconds in the file."""

    def __init__(self, path: Path) -> None:
        fresh = not path.exists() or path.stat().st_size == 0
        if not fresh:
            _reopen(path)
        self._file = path.open("ab", buffering=1 << 16)
        self._tracks: dict[str, int] = {}
        if fresh:
            self._file.write(b"[\n")
            for pid, name in ((_ATTEMPTS, "attempts"), (_ENGINES, "engines"), (_TRAINER, "trainer")):
                self._emit(ph="M", pid=pid, name="process_name", args={"name": name})

    def turn(self, attempt: AttemptId, turn: Turn, now: float) -> None:
        """now: when the turn ended, its command included."""
        key = str(attempt)
        engine_end = turn.began_s + turn.engine_s
        self._slice(key, f"turn {turn.index} on {turn.place}", turn.began_s, now, sampled=turn.end - turn.start)
        marks = [
            ("queue", turn.queue_s),
            ("prefill", turn.prefill_s),
            ("decode", max(0.0, turn.engine_s - turn.queue_s - turn.prefill_s)),
        ]
        at = turn.began_s
        for name, seconds in marks:
            if seconds > 0:
                self._slice(key, name, at, min(at + seconds, engine_end))
                at += seconds
        if turn.command is not None:
            began = engine_end + turn.tool_wait_s
            lane = turn.lane.value if turn.lane is not None else ""
            self._slice(key, f"tool ({lane})", began, began + turn.tool_s, command=turn.command[:200])

    def ended(self, trajectory: Trajectory) -> None:
        verdict = trajectory.verdict
        self._slice(
            str(trajectory.attempt),
            f"verify: {verdict.reward}",
            trajectory.ended_s - verdict.verify_s,
            trajectory.ended_s,
            stop=trajectory.stop.value,
        )

    def step(self, batch: Batch, report: StepReport, now: float) -> None:
        self._complete(
            _TRAINER, "steps", f"step {report.version}", now - report.seconds, report.seconds, batch=batch.id
        )

    def weights(self, engine: str, what: str, version: Version, began: float, seconds: float, **args: Any) -> None:
        self._complete(_ENGINES, engine, f"{what} v{version}", began, seconds, **args)

    def close(self) -> None:
        """Complete the JSON array."""
        if not self._file.closed:
            self._file.write(b"{}]\n")
            self._file.close()

    def _slice(self, attempt: str, name: str, began: float, ended: float, **args: Any) -> None:
        """A nestable slice on the attempt's own track; attempts overlap, so they are asynchronous slices."""
        common = {"cat": "attempt", "id": attempt, "pid": _ATTEMPTS, "tid": 0, "name": name}
        self._emit(ph="b", ts=began * 1e6, args=args, **common)
        self._emit(ph="e", ts=ended * 1e6, **common)

    def _complete(self, pid: int, track: str, name: str, began: float, seconds: float, **args: Any) -> None:
        tid = self._tracks.get(track)
        if tid is None:
            tid = self._tracks[track] = len(self._tracks) + 1
            self._emit(ph="M", pid=pid, tid=tid, name="thread_name", args={"name": track})
        self._emit(ph="X", pid=pid, tid=tid, name=name, ts=began * 1e6, dur=seconds * 1e6, args=args)

    def _emit(self, **event: Any) -> None:
        self._file.write(msgspec.json.encode(event) + b",\n")


def _reopen(path: Path) -> None:
    """Take the closing bracket off again: a resumed run goes on in the same file."""
    with path.open("r+b") as file:
        file.seek(0, 2)
        size = file.tell()
        file.seek(max(0, size - 4))
        if file.read() == b"{}]\n":
            file.truncate(size - 4)
