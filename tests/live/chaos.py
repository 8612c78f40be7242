"""kill -9 at random moments of a real run, and what was lost and leaked: `python -m tests.live.chaos`; with few kills,
test_chaos.py.

Before each kill the journal is read: every turn in it was acknowledged. In the end each of them must stand, token for
token, in its sibling's finished trajectory or still-open conversation, unless its group was dropped on purpose.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from agentrl.journal.faults import unseal
from agentrl.recipe.load import load
from agentrl.records import AttemptId, GroupId, Trajectory, TurnPayload
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.wiring import policy_of

_MARKS = {
    "engine": "agentrl.serve.embedded",
    "sandbox": "agentrl.sandbox.daemon",
    "trainer": "agentrl.train.worker",
    "parent": "agentrl.cli.main",
}

Turns = dict[tuple[int, int, int], tuple[int, ...]]  # (group, member, turn) -> sampled ids


@dataclass
class Report:
    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    found: int = 0
    dropped: int = 0  # their group was dropped on purpose
    restarted: int = 0  # their attempt was started over, and the run says so
    lost: list[tuple[int, int, int]] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


class Run:
    """`agentrl run` on one folder, started again whenever its parent was killed."""

    def __init__(self, folder: Path, recipe: str, overrides: list[str]) -> None:
        self.folder = folder
        self._argv = [sys.executable, "-m", "agentrl.cli.main", "run", recipe, "--run-dir", str(folder), "--quiet"]
        for override in overrides:
            self._argv += ["--set", override]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "parent.log").open("ab") as log:
            return subprocess.Popen(self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def again(self) -> None:
        self.process.wait()
        self.process = self._start()

    def victims(self, kind: str) -> list[psutil.Process]:
        if kind == "parent":
            return [psutil.Process(self.process.pid)]
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if _MARKS[kind] in line and "python" in Path(line[0]).name and "guard" not in " ".join(line[:3]):
                    found.append(process)
        return found


def run_with_kills(
    kinds: list[str], *, seed: int, steps: int, gap_s: tuple[float, float], overrides: list[str], drain: bool = False
) -> Report:
    """Play `kinds` in order, one kill each, then let the run finish, or drain it."""
    rng, report = random.Random(seed), Report()
    folder = Path(tempfile.mkdtemp(prefix="agentrl-chaos-")) / "run"
    run = Run(folder, "recipes/local.toml", [f"steps={steps}", f"seed={seed}", *overrides])
    acknowledged: Turns = {}
    while not turns_of(folder / "run.sqlite") and _wait_for_turns(run, 0.5):
        pass  # what dies before it ever served is a failed start, and ends the run
    for kind in kinds:
        if not _wait_for_turns(run, rng.uniform(*gap_s)):
            break
        victims = run.victims(kind)
        if not victims:
            continue
        victim = rng.choice(victims)
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGSTOP)
        acknowledged |= turns_of(folder / "run.sqlite")
        with contextlib.suppress(psutil.Error):
            victim.kill()
        report.kills[kind] += 1
        if kind == "parent":
            run.again()
    if drain and _wait_for_turns(run, gap_s[1]):  # a process that has just begun does not yet listen to it
        run.process.send_signal(signal.SIGINT)
    code = run.process.wait(timeout=900)
    report.summary = json.loads((folder / "summary.json").read_text()) | {"exit_code": code}
    account(report, acknowledged, folder)
    report.leaked = leaks(folder)
    return report


def _wait_for_turns(run: Run, gap_s: float) -> bool:
    """Let the run go on for a while; False when it ended by itself."""
    try:
        run.process.wait(timeout=gap_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def turns_of(path: Path) -> Turns:
    """Every acknowledged turn: of unfinished conversations and of finished trajectories."""
    found: Turns = {}
    if not path.exists():
        return found
    with (
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db,
        contextlib.suppress(sqlite3.OperationalError),  # killed before its tables were made
    ):
        for attempt, index, blob in db.execute("SELECT attempt, idx, payload FROM turns"):
            payload = msgspec.msgpack.decode(unseal(path, "turn", blob), type=TurnPayload)
            group, member, _ = _parse(attempt)
            found[group, member, index] = tuple(payload.reply)
        for (blob,) in db.execute("SELECT payload FROM trajectories"):
            found |= _of_trajectory(msgspec.msgpack.decode(unseal(path, "trajectory", blob), type=Trajectory))
    return found


def _of_trajectory(trajectory: Trajectory) -> Turns:
    group, member, _ = trajectory.attempt
    return {(group, member, turn.index): tuple(trajectory.tokens[turn.start : turn.end]) for turn in trajectory.turns}


def _parse(attempt: str) -> AttemptId:
    group, member, attempt_number = (int(part[1:]) for part in attempt.split("."))
    return AttemptId(GroupId(group), member, attempt_number)


def account(report: Report, acknowledged: Turns, folder: Path) -> None:
    """What became of every acknowledged turn, by the journal's own account of the run."""
    core = Core(policy_of(load(folder / "recipe.toml")))
    dropped: set[int] = set()
    over: set[tuple[int, int]] = set()  # siblings that were started over, carrying nothing
    with contextlib.closing(sqlite3.connect(folder / "run.sqlite")) as db:
        for row in db.execute("SELECT now, payload FROM events ORDER BY seq"):
            event = news.decode(unseal(folder, "event", row[1]))
            for command in core.handle(event, row[0]):
                if isinstance(command, orders.DropGroup):
                    dropped.add(command.group)
                if isinstance(command, orders.StartAttempt) and command.attempt.attempt and command.resume is None:
                    over.add(command.attempt[:2])
    now = turns_of(folder / "run.sqlite")
    report.acknowledged = len(acknowledged)
    for key, reply in acknowledged.items():
        if now.get(key) == reply:
            report.found += 1
        elif key[0] in dropped:
            report.dropped += 1
        elif key[:2] in over:
            report.restarted += 1
        else:
            report.lost.append(key)


def leaks(folder: Path) -> list[str]:
    """Processes, control groups and mounts of the run that are still there. A dying process is given a moment."""
    deadline = time.monotonic() + 10.0
    while (found := _leaks(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)  # waiting for the kernel, which has no event for "nothing is left"
    return found


def _leaks(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "pid", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = process.info["pid"] == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE
        if str(folder) in line and not ours:
            found.append(f"process {process.info['pid']}: {line[:120]}")
    label = json.loads((folder / "sandbox" / "daemon.json").read_text())["label"]
    for root, folders, _ in os.walk("/sys/fs/cgroup"):
        found += [f"cgroup {root}/{name}" for name in folders if label in name]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return found + [f"mount {line}" for line in mounts if str(folder) in line or label in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kill", choices=sorted(_MARKS), action="append", help="whom; default: everyone")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, nargs=2, default=(6.0, 12.0), help="seconds between two kills")
    options = parser.parse_args()
    for kind in options.kill or sorted(_MARKS):
        report = run_with_kills(
            [kind] * options.times,
            seed=options.seed,
            steps=10_000,
            gap_s=tuple(options.gap),
            overrides=["engines.restarts=100", "sandbox.restarts=100", "train.restarts=100"],
            drain=True,
        )
        summary = report.summary
        print(
            f"{kind}: {report.kills[kind]} kills; {report.acknowledged} acknowledged turns: {report.found} found, "
            f"{report.dropped} in dropped groups, {report.restarted} started over, {len(report.lost)} lost; "
            f"leaked {report.leaked or 'nothing'}; {summary['outcome']} after {len(summary['steps'])} steps, "
            f"ledger {'balanced' if summary['ledger_balanced'] else 'NOT balanced'}, "
            f"retried {summary['attempts']['retried']}, restarted {summary['attempts']['restarted']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
