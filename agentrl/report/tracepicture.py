"""A part of a run's trace as a picture: trainer, publications, engines, lanes and conversations, second by second."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from agentrl.errors import DataError, UserError
from agentrl.records import Record
from agentrl.report.plots import BLUE, GREEN, GREY, ORANGE, RED

_ATTEMPTS = 16  # conversations that are shown: those that did most
_BUSY = 5  # rows of one rank or one lane
_LOOKS = {
    "waits": (RED, "the trainer waits"),
    "step": (GREY, "optimizer step, claim to saved weights"),
    "turn": (BLUE, "an engine generates"),
    "tool": (GREEN, "a sandbox works"),
    "weights": (ORANGE, "weights are staged, swapped, live"),
    "queue": ("#cc6677", "waiting: an engine's queue, a lane"),
    "batch": ("#dddddd", "done, waiting for its batch"),
}


class Slice(Record):
    """Seconds of the run's clock."""

    process: str
    track: str
    name: str
    began: float
    ended: float


def read(path: Path) -> list[Slice]:
    """Also while the run writes. UserError where there is no trace, DataError where the file is none."""
    if not path.is_file():
        raise UserError(f"{path}: no trace here", hint="name a run's folder; its run writes trace.json")
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            event = _event(path, number, line)
            if event.get("name") == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            elif event.get("name") == "thread_name":
                tracks[event["pid"], event["tid"]] = event["args"]["name"]
            elif event.get("ph") == "X":
                where = processes[event["pid"]], tracks[event["pid"], event["tid"]]
                began = event["ts"] / 1e6
                found.append(
                    Slice(
                        process=where[0],
                        track=where[1],
                        name=event["name"],
                        began=began,
                        ended=began + event["dur"] / 1e6,
                    )
                )
    return found


def _event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    text = line.strip().rstrip(b",]")
    if text in (b"[", b"") or not line.endswith(b"\n"):  # a run that writes may leave half a line
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise DataError(f"{path}: line {number} is not of a trace ({exc})", hint="was it written by agentrl?") from exc


def png(slices: Sequence[Slice], title: str, *, began: float | None = None, ended: float | None = None) -> bytes:
    """began, ended: seconds of the run; default: its last three minutes."""
    last = max((s.ended for s in slices), default=0.0)
    ended = last if ended is None else ended
    began = max(0.0, ended - 180.0) if began is None else began
    if not began < ended:
        raise UserError(f"nothing lies between {began:g} s and {ended:g} s", hint=f"the trace ends at {last:.0f} s")
    shown = [s for s in slices if s.ended > began and s.began < ended]
    rows = _rows(shown)
    figure = Figure(figsize=(12, 1.4 + 0.16 * max(6, len(rows))), layout="constrained", dpi=110)
    axes = figure.subplots()
    for look, boxes in _boxes(shown, rows).items():
        axes.add_collection(PolyCollection(boxes, facecolors=_LOOKS[look][0], edgecolors="white", linewidths=0.2))
    _frame(axes, rows, began, ended)
    axes.set_title(f"{title}: {began:.0f} to {ended:.0f} s", fontsize=10, loc="left")
    figure.legend(
        handles=[Patch(color=colour, label=label) for colour, label in _LOOKS.values()],
        fontsize=8,
        frameon=False,
        ncols=4,
        loc="outside lower center",
    )
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": "agentrl"})
    return data.getvalue()


def _rows(shown: Sequence[Slice]) -> dict[tuple[str, str], int]:
    """Tracks from the top down: trainer, publications, engines, hosts, conversations; of each the first few."""
    kinds = ("trainer", "publications", "engine", "host", "attempts")
    tracks: dict[tuple[int, str], dict[str, float]] = {}
    for s in sorted(shown, key=lambda s: s.began):
        kind = next((i for i, name in enumerate(kinds) if s.process.startswith(name)), len(kinds))
        busy = tracks.setdefault((kind, s.process), {})
        busy[s.track] = busy.get(s.track, 0.0) + (s.ended - s.began if _look(s) in ("turn", "tool") else 0.0)
    rows: dict[tuple[str, str], int] = {}
    at = 1
    for kind, process in sorted(tracks):
        busy = tracks[kind, process]
        most = sorted(busy, key=lambda track: -busy[track])[:_ATTEMPTS]
        for track in sorted(busy) if process != "attempts" else [track for track in busy if track in most]:
            if int(track.partition(" .")[2] or 0) < _BUSY:
                rows[process, track] = at
                at += 1
        at += 1  # a gap
    return rows


def _boxes(shown: Sequence[Slice], rows: Mapping[tuple[str, str], int]) -> dict[str, list[list[tuple[float, float]]]]:
    """Corners by look, in the order of _LOOKS: what lies within another is drawn over it."""
    found: dict[str, list[list[tuple[float, float]]]] = {look: [] for look in ("step", "batch", *_LOOKS)}
    for s in shown:
        row, look = rows.get((s.process, s.track)), _look(s)
        if row is not None and look:
            low, high = row + 0.06, row + 0.94
            found[look].append([(s.began, low), (s.ended, low), (s.ended, high), (s.began, high)])
    return found


def _look(s: Slice) -> str:
    if s.process == "trainer":
        return "waits" if s.name.startswith("waits") else "step" if s.name.startswith("step") else ""
    if s.process == "publications":
        return "weights"
    if s.process.startswith("engine"):
        return "turn"
    if s.process.startswith("host"):
        return "tool"
    if s.name in ("prefill", "decode"):
        return "turn"
    if s.name in ("tool", "open", "close") or s.name.startswith("verify"):
        return "tool"
    if s.name == "queue" or s.name.startswith("wait: "):
        return "queue"
    return "batch" if s.name.startswith("waits for") else "step" if s.name.startswith("trains") else ""


def _frame(axes: Any, rows: Mapping[tuple[str, str], int], began: float, ended: float) -> None:
    axes.set_xlim(began, ended)
    axes.set_ylim(max(rows.values(), default=0) + 1, 0)
    axes.set_yticks([row + 0.5 for row in rows.values()], [track for _, track in rows], fontsize=6)
    axes.set_xlabel("seconds of the run", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    first: dict[str, int] = {}
    for (process, _), row in rows.items():
        first.setdefault(process, row)
    for process, row in first.items():
        axes.annotate(
            process,
            (0, row),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            textcoords="offset points",
            fontsize=8,
            weight="bold",
            va="bottom",
        )
