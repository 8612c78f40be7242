"""The examples run, and say what they promise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Sandbox as Section
from agentrl.sandbox.launch import start_daemon
from agentrl.tasks.harbor import HarborSource
from agentrl.tasks.verifier import HarborVerifier
from tests.cli import RECIPE, left_behind, started

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("replay_decisions.py", "ledger: 1 admitted, 1 trained, 0 dropped; 1 late"),
        ("one_attempt.py", "165 tokens, 94 of them trainable, oldest version 0"),
    ],
)
def test_a_script_runs(script: str, says: str) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / script)]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_every_script_is_run() -> None:
    shown = {"replay_decisions.py", "one_attempt.py", "external_trainer.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == shown


@pytest.mark.live
def test_a_trainer_of_ones_own(tmp_path: Path) -> None:
    """Its weights are what the engines hold in the end."""
    small = ["batch.groups=1", "batch.siblings=2", "window.groups=2", "engines.slots=8", "engines.count=1"]
    argv = ["run", RECIPE, "--run-dir", tmp_path / "run", "--steps", "2", "--json", "--set", "train.embedded=false"]
    with started(tmp_path, *argv, *(part for key in small for part in ("--set", key))) as run:
        url = eventually(lambda: (tmp_path / "run" / "url").read_text())
        command = [sys.executable, "-W", "error", EXAMPLES / "external_trainer.py", url.strip()]
        command += [tmp_path / "run" / "token", tmp_path / "work"]
        done = subprocess.run(command, check=False, timeout=90, capture_output=True, text=True)
        out, err = run.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert "version 2: batch 1" in done.stdout
    assert done.stdout.endswith("the run is over\n")
    assert run.returncode == 0, err
    summary = json.loads(out)
    assert (summary["outcome"], summary["engines"], summary["ledger_balanced"]) == ("done", {"e0": 2}, True)
    made, published = (
        folder / "model.safetensors" for folder in (tmp_path / "work/v2", tmp_path / "run/weights/v000002")
    )
    assert made.read_bytes() == published.read_bytes()
    assert left_behind(tmp_path) == []


def eventually(read: Callable[[], str], within_s: float = 60.0) -> str:
    """What another process writes, once it is there."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        with contextlib.suppress(FileNotFoundError):
            if said := read():
                return said
        time.sleep(0.02)
    raise AssertionError("not within its time")


@pytest.mark.live
def test_the_task_can_be_solved_and_is_not_solved_by_itself(tmp_path: Path) -> None:
    [task] = HarborSource(EXAMPLES / "tasks_folder").next_tasks(1)
    solution = (Path(task.root) / "solution" / "solve.sh").read_text()

    async def rewards() -> list[float | None]:
        daemon = await start_daemon(LocalHost(), Section(), run_dir=str(tmp_path), label="example")
        try:
            earned = []
            for number, command in enumerate(("true", solution)):
                box = await daemon.host.open(task, label="example", lease_s=60.0, request_id=f"open{number}")
                await box.exec(command, timeout_s=20.0, request_id=f"act{number}")
                earned.append((await HarborVerifier().grade(task, box, request_id=f"grade{number}")).reward)
                await box.close()
            return earned
        finally:
            await daemon.stop()

    assert asyncio.run(rewards()) == [0.0, 1.0]
