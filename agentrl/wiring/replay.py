"""A run's journal through a fresh core: the same events must lead to the same commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import DataError
from agentrl.journal.reader import JournalReader
from agentrl.records import Record
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.laws import LawBroken, Laws
from agentrl.wiring.recording import policy_in


class Difference(Record):
    """The first event whose commands are not the journalled ones. expected: the digest in the journal; actual and
    commands: what this core gives."""

    seq: int  # from 1, as in the journal
    now_s: float
    event: dict[str, Any]
    expected: str
    actual: str
    commands: list[dict[str, Any]]


class Broken(Record):
    seq: int
    now_s: float
    law: int
    what: str


class Replay(Record):
    """identical: every event led to the journalled commands and, where laws were asked for, broke none."""

    folder: str
    events: int
    processes: int
    steps: int
    version: int
    outcome: str  # of the last process; empty where it was killed or still runs
    laws_checked: bool
    identical: bool
    difference: Difference | None = None
    broken: Broken | None = None


def replay(folder: Path, *, laws: bool = False) -> Replay:
    """Blocking; also while the run is live. Stops at the first difference or broken law.

    UserError where the folder holds no run, DataError where the journal is damaged.
    """
    core = Core(policy_in(folder))
    checker = Laws() if laws else None
    seq = processes = 0
    difference: Difference | None = None
    broken: Broken | None = None
    for seq, (now, data, digest) in enumerate(JournalReader(folder / "run.sqlite").events(), start=1):
        event = _decoded(folder, seq, data)
        processes += isinstance(event, news.Resumed)
        try:
            commands = core.handle(event, now)
        except Exception as exc:  # with another policy even its invariants may not hold
            difference = _stumbled(seq, now, event, digest, exc)
            break
        difference = _difference(seq, now, event, digest, commands)
        broken = _law(checker, core, commands, seq, now)
        if difference is not None or broken is not None:
            break
    return Replay(
        folder=str(folder),
        events=seq,
        processes=processes,
        steps=core.steps,
        version=core.version,
        outcome=core.finished.outcome if core.finished is not None else "",
        laws_checked=laws,
        identical=difference is None and broken is None,
        difference=difference,
        broken=broken,
    )


def _decoded(folder: Path, seq: int, data: bytes) -> news.Event:
    try:
        return news.decode(data)
    except msgspec.DecodeError as exc:
        raise DataError(
            f"{folder / 'run.sqlite'}: event {seq} is not one that this agentrl knows ({exc})",
            hint="replay with the agentrl that wrote the run",
        ) from exc


def _difference(
    seq: int, now: float, event: news.Event, digest: bytes, commands: list[orders.Command]
) -> Difference | None:
    actual = orders.digest(commands)
    if actual == digest:
        return None
    return Difference(
        seq=seq,
        now_s=now,
        event=msgspec.to_builtins(event),
        expected=digest.hex(),
        actual=actual.hex(),
        commands=msgspec.to_builtins(commands),
    )


def _stumbled(seq: int, now: float, event: news.Event, digest: bytes, exc: Exception) -> Difference:
    return Difference(
        seq=seq,
        now_s=now,
        event=msgspec.to_builtins(event),
        expected=digest.hex(),
        actual=f"{type(exc).__name__}: {exc}",
        commands=[],
    )


def _law(checker: Laws | None, core: Core, commands: list[orders.Command], seq: int, now: float) -> Broken | None:
    if checker is None:
        return None
    try:
        checker.check(core, commands)
    except LawBroken as exc:
        return Broken(seq=seq, now_s=now, law=exc.law, what=str(exc))
    return None
