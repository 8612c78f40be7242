"""Runs as `agentrl top` sees them, in situations worth a picture: made up, but each a Status that a run could send."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.records import (
    AttemptId,
    GroupId,
    Lane,
    LaneStatus,
    Place,
    SandboxHostStatus,
    TaskId,
    Turn,
    Version,
)
from agentrl.runtime.status import (
    DownStatus,
    EngineStatus,
    Frame,
    GroupStatus,
    Life,
    MemberStatus,
    RankStatus,
    Status,
    StepStatus,
)

NOW = 1_504.0
SNAPSHOTS = Path(__file__).parent / "snapshots"
_CELL = 12.2  # width of a character in Textual's SVG
TASKS = ("swe/django-11099", "swe/astropy-6938", "chores/largest-0050", "term/fix-permissions", "swe/sympy-20154")


def engine(name: str, version: int, **more: Any) -> EngineStatus:
    given: dict[str, Any] = {
        "phase": "serving",
        "admitted": True,
        "conversations": 56,
        "running": 41,
        "waiting": 0,
        "slots": 64,
        "kv_used_tokens": 312_000,
        "kv_total_tokens": 524_288,
        "tokens_per_s": 1_840.0,
        "prefix_reuse": 0.93,
    }
    given |= more
    given.setdefault("ranks", tuple(rank(i, given) for i in range(2)))
    return EngineStatus(name=name, version=Version(version), **given)


def rank(index: int, engine: dict[str, Any]) -> RankStatus:
    """One of two; the first has more to do."""
    share = 0.6 - 0.2 * index
    counted = ("conversations", "running", "waiting", "kv_used_tokens")
    return RankStatus(
        rank=index,
        slots=engine["slots"] // 2,
        kv_total_tokens=engine["kv_total_tokens"] // 2,
        tokens_per_s=share * engine["tokens_per_s"],
        prefix_reuse=engine["prefix_reuse"],
        **{name: round(share * engine[name]) for name in counted},
    )


def host(name: str, **queued: int) -> SandboxHostStatus:
    caps = {Lane.RESET: 8, Lane.COMMAND: 32, Lane.PACKAGE: 8, Lane.VERIFY: 16, Lane.CLEANUP: 8}
    cpus = {
        Lane.RESET: range(16, 20),
        Lane.COMMAND: range(20, 44),
        Lane.PACKAGE: range(44, 52),
        Lane.VERIFY: range(52, 62),
        Lane.CLEANUP: range(62, 64),
    }
    lanes = tuple(
        LaneStatus(
            lane=lane,
            cap=cap,
            running=cap if queued.get(lane) else cap // 3,
            queued=queued.get(lane, 0),
            cpus=tuple(cpus[lane]),
            wait_s_mean=0.3 * queued.get(lane, 0),
            wait_s_p95=0.8 * queued.get(lane, 0),
            done=900,
        )
        for lane, cap in caps.items()
    )
    return SandboxHostStatus(name=name, backend="namespace", isolation="namespaces, cgroups", live=112, lanes=lanes)


def group(number: int, done: int, *, siblings: int = 8, version: int = 41, slow_s: float = 0.0) -> GroupStatus:
    """slow_s: how long its first running sibling has run; the others less."""
    usual = 30.0 + 7.0 * (number % 5)
    members = []
    for i in range(siblings):
        place, box = f"e{(number + i) % 3}/{i % 2}", f"h{(number + i) % 2}"
        if i < done:
            spent = usual * (0.6 + 0.1 * (i % 5))
            members.append(
                MemberStatus(i, "done", 1, place, box, 0.0, Version(version), 3_000 + 700 * i, 6 + i % 4, float(i % 2),
                             0.6 * spent, 0.4 * spent)
            )  # fmt: skip
        else:
            so_far = slow_s if slow_s and i == done else usual * 0.5 - i
            members.append(MemberStatus(i, "running", 1, place, box, max(1.0, so_far), Version(version)))
    return GroupStatus(
        id=GroupId(number),
        task=TaskId(TASKS[number % len(TASKS)]),
        age_s=max(slow_s, usual),
        done=done,
        running=siblings - done,
        siblings=siblings,
        oldest=Version(version),
        ready=done == siblings,
        members=tuple(members),
    )


def steps(count: int, *, interval_s: float, waited_s: float, train_s: float, age: int = 1) -> tuple[StepStatus, ...]:
    """waited_s varies a little from step to step."""
    return tuple(
        StepStatus(
            batch=i,
            at_s=NOW - interval_s * (count - i),
            interval_s=interval_s,
            waited_s=waited_s * (0.5 + 0.25 * (i * 7 % 5)),
            train_s=train_s,
            ages=((max(0, age - 1), 5), (age, 3)),
        )
        for i in range(count)
    )


def healthy() -> Status:
    """The trainer trains; the next batch fills; nothing is wrong."""
    groups = [
        group(328, 8),
        group(329, 8),
        group(330, 8),
        *(group(331 + i, 7 - i, version=41 + min(1, i // 3)) for i in range(8)),
    ]
    return Status(
        now_s=NOW,
        step=41,
        steps=200,
        version=Version(42),
        bound=4,
        trainer="stepping",
        trainer_for_s=4.2,
        bank=3,
        batch_groups=8,
        places_used=19,
        window_groups=24,
        attempts=168,
        window_attempts=192,
        live_version=Version(42),
        paused=False,
        draining=False,
        admitted=352,
        trained=328,
        dropped={"stale": 2},
        retried=3,
        restarted=1,
        late=0,
        engines=tuple(engine(f"e{i}", 42, running=38 + 3 * i, conversations=52 + 4 * i) for i in range(3)),
        groups=tuple(groups),
        hosts={"h0": 84, "h1": 84},
        blockers="",
        stall_s=600.0,
        quiet_s=0.3,
        attempt_timeout_s=600.0,
        waited_s=96.0,
        watched_s=1_470.0,
        length_ratio=0.99,
        recent=steps(40, interval_s=36.0, waited_s=2.6, train_s=8.8),
        sandboxes=(host("h0"), host("h1")),
    )


def straggler() -> Status:
    """Seven groups are ready; one sibling of the eighth keeps the trainer waiting."""
    ready = [group(328 + i, 8) for i in range(7)]
    return msgspec.structs.replace(
        healthy(),
        trainer="ready",
        trainer_for_s=94.0,
        bank=7,
        groups=(*ready, group(335, 7, slow_s=312.0), *(group(336 + i, 4 - i, version=42) for i in range(4))),
        blockers="waiting for g335.m7.t0 (on e0/1 and h0 for 312 s)",
        quiet_s=6.0,
        waited_s=370.0,
        recent=steps(40, interval_s=48.0, waited_s=14.0, train_s=8.8),
    )


def trainer_bound() -> Status:
    """Batches wait for the trainer; the engines could do with less."""
    return msgspec.structs.replace(
        healthy(),
        trainer_for_s=41.0,
        bank=15,
        places_used=24,
        groups=(*(group(328 + i, 8, version=41 - i // 8) for i in range(15)), group(343, 3)),
        recent=steps(40, interval_s=62.0, waited_s=0.2, train_s=60.0, age=1),
        waited_s=5.0,
        watched_s=2_480.0,
        engines=tuple(engine(f"e{i}", 42, running=12, conversations=14, tokens_per_s=540.0) for i in range(3)),
    )


def rolling() -> Status:
    """Version 42 is on its way: one engine has it, one swaps, one has staged it and serves on."""
    return msgspec.structs.replace(
        healthy(),
        trainer="ready",
        trainer_for_s=0.4,
        bank=5,
        live_version=Version(41),
        engines=(
            engine("e0", 42, conversations=61),
            engine("e1", 41, phase="swapping to v42", running=0, waiting=38, tokens_per_s=610.0),
            engine("e2", 41, phase="staging v42", running=57),
        ),
        groups=tuple(group(328 + i, 8, version=40 + i % 2) for i in range(5))
        + tuple(group(333 + i, 6 - i, version=40 + i % 3) for i in range(7)),
        blockers="waiting for g333.m6.t0 (on e0/0 and h1 for 15 s)",
    )


def lost_host() -> Status:
    """A sandbox host went away; its attempts start again elsewhere."""
    lost = [group(336 + i, 3, version=42) for i in range(4)]
    waiting = [
        msgspec.structs.replace(
            g,
            running=0,
            members=tuple(
                m
                if m.phase == "done"
                else msgspec.structs.replace(m, phase="waiting", for_s=0.0, place="", host="", tries=2)
                for m in g.members
            ),
        )
        for g in lost
    ]
    return msgspec.structs.replace(
        healthy(),
        trainer="ready",
        trainer_for_s=21.0,
        bank=6,
        retried=87,
        attempts=84,
        hosts={"h0": 84},
        sandboxes=(host("h0", command=9, reset=14),),
        down=(DownStatus(name="h1", kind="sandbox host", at_s=NOW - 33.0, reason="no answer to 3 questions"),),
        groups=tuple(group(330 + i, 8) for i in range(6)) + tuple(waiting),
        blockers="waiting for g334.m2.t1 (on e1/0 and h0 for 18 s)",
    )


def crowded(attempts: int = 2_048) -> Status:
    """Many conversations at once."""
    return msgspec.structs.replace(
        straggler(),
        groups=tuple(group(400 + i, i % 8, siblings=16, slow_s=float(i)) for i in range(attempts // 16)),
        engines=tuple(engine(f"engine-{i:02}", 42 - i % 2) for i in range(32)),
    )


SCENES: dict[str, Callable[[], Status]] = {
    "healthy": healthy,
    "straggler": straggler,
    "trainer-bound": trainer_bound,
    "rolling": rolling,
    "lost-host": lost_host,
}

NEWS: tuple[dict[str, Any], ...] = (
    {"now": NOW - 9, "event": {"type": "StepFinished", "batch": 40, "version": 42, "seconds": 8.9}, "commands": []},
    {"now": NOW - 8, "event": {"type": "EngineStaged", "engine": "e0", "epoch": 0, "version": 42}, "commands": []},
    {
        "now": NOW - 6,
        "event": {"type": "EngineLoaded", "engine": "e0", "epoch": 0, "version": 42},
        "commands": [{"type": "SwapWeights", "engine": "e1", "epoch": 0, "version": 42}],
    },
    {
        "now": NOW - 4,
        "event": {"type": "AttemptFailed", "attempt": [331, 2, 0], "blame": "infra", "detail": "h1 does not answer"},
        "commands": [],
    },
    {
        "now": NOW - 1,
        "event": {
            "type": "AttemptEnded",
            "facts": {"attempt": [333, 4, 0], "reward": 1.0, "tokens": 5_120, "turns": 9},
        },
        "commands": [],
    },
)


def turn(index: int) -> Turn:
    return Turn(
        index=index,
        start=100 * index,
        end=100 * index + 60,
        observed_end=100 * index + 90,
        place=Place("e0", 1),
        prompt_tokens=500 + 90 * index,
        cached_tokens=480 + 85 * index,
        reusable_tokens=490,
        command=f"pytest -q tests/test_{index}.py",
        exit_code=index % 2,
        lane=Lane.COMMAND,
        engine_s=1.9,
        queue_s=0.2,
        prefill_s=0.2,
        decode_s=1.5,
        tool_wait_s=0.3 * index,
        tool_s=2.0 + index,
    )


def frame_text(svg: str) -> str:
    """The characters of one frame, line by line, without colours."""
    lines: dict[float, list[str]] = {}
    for x, y, text in re.findall(r'<text [^>]*x="([\d.]+)" y="([\d.]+)" textLength[^>]*>([^<]*)</text>', svg):
        cells = lines.setdefault(float(y), [])
        shown = html.unescape(text).replace("\xa0", " ")
        at = round(float(x) / _CELL)
        cells.extend(" " * (at + len(shown) - len(cells)))
        cells[at : at + len(shown)] = shown
    return "".join("".join(lines[y]).rstrip() + "\n" for y in sorted(lines))


class StillFeed:
    """Shows what it is given, then stays. `asked` is what the keys asked of it."""

    def __init__(self, *frames: Status, live: bool = True, news: Sequence[dict[str, Any]] = NEWS) -> None:
        self.name = "swe-20260101-120000"
        self.live = live
        self.asked: list[object] = []
        self._frames = [Frame(status=status, news=tuple(news)) for status in frames]

    async def watch(self, show: Callable[[Frame], None]) -> None:
        for frame in self._frames:
            show(frame)
        await asyncio.Event().wait()

    async def pause(self, on: bool) -> str:
        self.asked.append(("pause", on))
        return "paused"

    async def drain(self) -> str:
        self.asked.append("drain")
        return "it drains"

    async def life(self, attempt: AttemptId) -> Life:
        self.asked.append(attempt)
        return Life(
            turns=tuple(turn(i) for i in range(4)),
            open_wait_s=0.8,
            open_s=1.4,
            verify_wait_s=0.5,
            verify_s=2.2,
            ended_s=NOW - 40.0,
        )

    def play(self, *, speed: float, running: bool) -> None:
        self.asked.append((speed, running))
