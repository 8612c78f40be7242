"""The file of a Chrome trace: processes, tracks, slices and counters as JSON, one a line; append-only and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_LIMIT_BYTES = 256 << 20  # of slices that come with every turn: a browser opens no more
_END = b'{"ph":"M","pid":0,"name":"end"}]\n'  # Perfetto counts an empty object as a fault of the file


class TraceFile:
    """Opens or goes on with `path`. Not thread-safe. The caller closes it.

    Process and track ids are kept over resumes: they are read back from the file.
    """

    def __init__(self, path: Path, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], int] = {}
        if path.exists():
            self._remember(path)
        self._file = path.open("ab", buffering=1 << 16)
        self._bytes = self._file.tell()
        if not self._bytes:
            self._write(b"[\n")

    def slice(
        self,
        process: str,
        track: str,
        name: str,
        began: float,
        ended: float,
        args: dict[str, Any],
        *,
        bulk: bool = False,
    ) -> None:
        """bulk: of the kind that makes a trace long; left out once the file is full.

        Viewers drop what reaches a microsecond out of the slice around it: both edges are rounded, never a length.
        """
        if bulk and self._full(process, began):
            return
        pid, tid = self._track(process, track)
        at = _us(began)
        event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": at, "dur": max(0, _us(ended) - at)}
        self._emit(event | {"args": args} if args else event)

    def counter(self, process: str, name: str, now: float, **values: float) -> None:
        self._emit({"ph": "C", "pid": self._process(process), "name": name, "ts": _us(now), "args": values})

    def instant(self, process: str, name: str, now: float) -> None:
        pid, tid = self._track(process, "news")
        self._emit({"ph": "i", "s": "p", "pid": pid, "tid": tid, "name": name, "ts": _us(now)})

    def close(self) -> None:
        """Complete the JSON array."""
        if not self._file.closed:
            self._file.write(_END)
            self._file.close()

    def _full(self, process: str, now: float) -> bool:
        if self._bytes < self._limit:
            return False
        if ("trainer", "news") not in self._tracks:
            self.instant("trainer", f"the trace is full ({self._limit >> 20} MiB): from here on without turns", now)
        return True

    def _track(self, process: str, track: str) -> tuple[int, int]:
        pid = self._process(process)
        tid = self._tracks.get((process, track))
        if tid is None:
            tid = self._tracks[process, track] = len(self._tracks) + 1
            self._emit({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
            self._emit({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        return pid, tid

    def _process(self, process: str) -> int:
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            self._emit({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
            order = 1_000 if process == "attempts" else 0 if process == "trainer" else 1 + (process > "host")
            self._emit({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}})
        return pid

    def _emit(self, event: dict[str, Any]) -> None:
        self._write(msgspec.json.encode(event) + b",\n")

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._bytes += len(line)

    def _remember(self, path: Path) -> None:
        """Names and ids of an earlier process's trace; its end, and a line that a kill cut short, are taken off."""
        good, names = 0, {}
        with path.open("r+b") as file:
            for line in file:
                if not line.endswith((b"[\n", b",\n")):
                    break
                good += len(line)
                if line.startswith(b'{"ph":"M"'):
                    said = msgspec.json.decode(line.rstrip(b",\n"))
                    if said["name"] == "process_name":
                        names[said["pid"]] = said["args"]["name"]
                        self._processes[said["args"]["name"]] = said["pid"]
                    elif said["name"] == "thread_name":
                        self._tracks[names[said["pid"]], said["args"]["name"]] = said["tid"]
            file.truncate(good)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
