"""The examples run, and say what they promise."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Sandbox as Section
from agentrl.sandbox.launch import start_daemon
from agentrl.tasks.harbor import HarborSource
from agentrl.tasks.verifier import HarborVerifier

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
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"replay_decisions.py", "one_attempt.py"}


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
