"""The journal against the real world: kill -9 at any moment, and a disk that fills up."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.journal.reader import JournalReader
from agentrl.journal.store import SqliteJournal
from tests.builders import attempt_id, trajectory, turn_payload

pytestmark = pytest.mark.live

WRITER = """
import asyncio, sys
from pathlib import Path
from agentrl.journal.store import SqliteJournal
from tests.builders import attempt_id, trajectory, turn_payload

async def play(journal, member, first):
    for group in range(first, 1_000_000):
        attempt = attempt_id(group, member)
        for index in range(3):
            journal.record_turn(attempt, turn_payload(index))
            await journal.flush()
            print("turn", group, member, index, flush=True)
        journal.record_event(float(group), b"ended", b"")
        await journal.keep(trajectory(attempt, reply=200))
        print("kept", group, member, 0, flush=True)

async def main():
    journal = SqliteJournal.open(Path(sys.argv[1]))
    async with asyncio.TaskGroup() as group:
        for member in range(8):
            group.create_task(play(journal, member, int(sys.argv[2])))

asyncio.run(main())
"""


def test_kill_9_at_random_moments_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    chance = random.Random(0)
    kept: set[tuple[int, int]] = set()
    turns: dict[tuple[int, int], int] = {}
    for round_ in range(20):
        command = [sys.executable, "-c", WRITER, str(path), str(round_ * 1_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline() for _ in range(chance.randrange(1, 300))]
            writer.kill()
            said += writer.stdout.readlines()  # what it had acknowledged before it died
        for line in said:
            if line.endswith("\n"):
                word, group, member, index = line.split()
                if word == "kept":
                    kept.add((int(group), int(member)))
                else:
                    turns[int(group), int(member)] = int(index)
    assert len(kept) > 200

    async def check() -> None:
        journal = SqliteJournal.open(path)
        found = await journal.load([attempt_id(*key) for key in sorted(kept)])
        assert found == [trajectory(attempt_id(*key), reply=200) for key in sorted(kept)]
        for key, last in turns.items():
            if await journal.kept(attempt_id(*key)) is None:
                durable = await journal.turns(attempt_id(*key))
                assert durable[: last + 1] == [turn_payload(index) for index in range(last + 1)]
        assert len(list(journal.events())) >= len(kept)
        await journal.aclose()

    asyncio.run(check())


FILLER = """
import asyncio, sys
from pathlib import Path
from agentrl.errors import UnavailableError
from agentrl.journal.store import SqliteJournal
from tests.builders import attempt_id, trajectory

async def main():
    folder = Path(sys.argv[1])
    journal = SqliteJournal.open(folder / "run.sqlite")
    kept = []
    try:
        for group in range(10_000):
            await journal.keep(trajectory(attempt_id(group), reply=5_000))
            kept.append(group)
    except UnavailableError as exc:
        print(exc, "|", exc.hint)
    for again in (lambda: journal.record_event(0.0, b"", b""), lambda: None):
        try:
            again()
        except UnavailableError as exc:
            print("again:", exc)
    try:
        await journal.aclose()
    except UnavailableError:
        pass
    (folder / "ballast").unlink()
    journal = SqliteJournal.open(folder / "run.sqlite")
    await journal.load([attempt_id(group) for group in kept])
    await journal.keep(trajectory(attempt_id(10_000)))
    await journal.aclose()
    print("resumed with", len(kept))

asyncio.run(main())
"""


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    """On a 2 MB file system of its own, half of it taken by a file that is removed afterwards."""
    mount = f"mount -t tmpfs -o size=2m none {tmp_path} && head -c 1000000 /dev/zero > {tmp_path}/ballast"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*inside, mount], check=False, capture_output=True, timeout=20).returncode:
        pytest.skip("no user namespace in which to mount a small file system")
    run = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    done = subprocess.run(
        [*inside, run, sys.executable, FILLER], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, again, resumed = done.stdout.splitlines()
    assert "run.sqlite: no space left to write the journal; everything acknowledged so far is safe" in first
    assert "start the same command again" in first
    assert again.startswith("again:")
    assert int(resumed.rpartition(" ")[2]) > 5


def test_reading_while_it_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        journal = SqliteJournal.open(tmp_path / "run.sqlite")
        journal.record_event(1.0, b"one", b"orders")
        await journal.flush()
        assert list(JournalReader(tmp_path / "run.sqlite").events()) == [(1.0, b"one", b"orders")]
        await journal.aclose()

    asyncio.run(scenario())


def test_turns_a_second(tmp_path: Path) -> None:
    """`pytest tests/live/test_journal_crash.py -k second -s` prints the figures. The bar is far below them: a loaded
    machine must pass too."""
    payload = turn_payload(reply=200, observed=200)

    async def rate(journal: SqliteJournal, writers: int, turns: int) -> float:
        async def writer(member: int) -> None:
            for _ in range(turns):
                journal.record_turn(attempt_id(writers, member), payload)
                await journal.flush()

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for member in range(writers):
                group.create_task(writer(member))
        return writers * turns / (time.perf_counter() - began)

    async def scenario() -> float:
        journal = SqliteJournal.open(tmp_path / "run.sqlite")
        best = 0.0
        for writers, turns in ((1, 100), (16, 50), (128, 20)):
            rates = [await rate(journal, writers, turns) for _ in range(3)]
            best = max(best, *rates)
            print(f"{writers:4} conversations: {sorted(rates)[1]:8,.0f} durable turns/s (median of 3)")
        await journal.aclose()
        return best

    assert asyncio.run(scenario()) >= 1_000
