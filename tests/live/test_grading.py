"""Chores and the verifier in real sandboxes: what the oracle earns, what idleness earns, what tampering earns."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from agentrl.hosts.local import LocalHost
from agentrl.ports import Sandbox, SandboxHost
from agentrl.recipe.schema import Sandbox as Section
from agentrl.records import Blame, Task, Verdict
from agentrl.sandbox.launch import start_daemon
from agentrl.tasks import harbor
from agentrl.tasks.chores import KINDS, demo, generate
from agentrl.tasks.verifier import HarborVerifier

pytestmark = pytest.mark.live

DEADLINE_S = 60.0
Act = Callable[[Sandbox], Awaitable[object]]


class Bench:
    """One daemon and one event loop for all tests of this module."""

    def __init__(self, runner: asyncio.Runner, host: SandboxHost) -> None:
        self._runner = runner
        self._host = host

    def grade(self, task: Task, act: Act) -> Verdict:
        async def attempt() -> Verdict:
            name = uuid.uuid4().hex
            async with asyncio.timeout(DEADLINE_S):
                box = await self._host.open(task, label="test", lease_s=60.0, request_id=name)
                try:
                    await act(box)
                    return await HarborVerifier().grade(task, box, request_id=f"{name}.grade")
                finally:
                    await box.close()

        return self._runner.run(attempt())


@pytest.fixture(scope="module", params=["namespace", "process"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("run")
    with asyncio.Runner() as runner:
        section = Section(backend=request.param)
        daemon = runner.run(start_daemon(LocalHost(), section, run_dir=str(folder), label="test"))
        try:
            yield Bench(runner, daemon.host)
        finally:
            runner.run(daemon.stop())


def trusted(folder: Path) -> Task:
    return msgspec.structs.replace(harbor.load(folder), trusted=True)


def doing(*commands: str) -> Act:
    async def act(box: Sandbox) -> None:
        for command in commands:
            await box.exec(command, timeout_s=10.0, request_id=uuid.uuid4().hex)

    return act


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_oracle_earns_everything_and_idleness_nothing(kind: str, bench: Bench, tmp_path: Path) -> None:
    task = trusted(generate(kind, 1, tmp_path))
    assert bench.grade(task, doing(*demo(kind, 1))).reward == 1.0
    assert bench.grade(task, doing()).reward == 0.0


def test_the_solution_file_is_the_oracle(bench: Bench, tmp_path: Path) -> None:
    task = trusted(generate("make", 1, tmp_path))
    solution = (Path(task.root) / "solution" / "solve.sh").read_text()
    assert bench.grade(task, doing(solution)).reward == 1.0


def test_half_the_goals_earn_half(bench: Bench, tmp_path: Path) -> None:
    task = trusted(generate("make", 1, tmp_path))
    assert bench.grade(task, doing(demo("make", 1)[0])).reward == 0.5


def test_breaking_what_had_to_stay_earns_nothing(bench: Bench, tmp_path: Path) -> None:
    task = trusted(generate("delete", 1, tmp_path))
    assert bench.grade(task, doing("rm *")).reward == 0.0


# --- the verifier -----------------------------------------------------------------------------------------------------


def task_with(folder: Path, test: str, *, timeout_s: float = 20.0) -> Task:
    files = {
        "task.toml": f"[verifier]\ntimeout_sec = {timeout_s}\n",
        "instruction.md": "Nothing.",
        "environment/Dockerfile": "FROM x\nWORKDIR /work\n",
        "tests/test.sh": f"#!/bin/sh\n{test}\n",
        "tests/data/expected": "42",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return trusted(folder)


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ('echo \'{"reward": -3, "speed": 2}\' > /logs/verifier/reward.json', -3.0),
        ("echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 0.5}' > /logs/verifier/reward.json", 0.5),
        ("cat /tests/data/expected > /logs/verifier/reward.txt; exit 3", 42.0),
        ("pwd | grep -q work$ && echo 1 > /logs/verifier/reward.txt", 1.0),
    ],
)
def test_the_reward_is_what_the_tests_leave(test: str, reward: float, bench: Bench, tmp_path: Path) -> None:
    verdict = bench.grade(task_with(tmp_path / "t", test), doing())
    assert (verdict.reward, verdict.blame) == (reward, None), verdict.detail
    assert 0 < verdict.verify_s < DEADLINE_S


@pytest.mark.parametrize(
    ("test", "detail"),
    [
        ("echo no luck; exit 1", "no reward.json and no reward.txt.*no luck"),
        ("echo nan > /logs/verifier/reward.txt", "'nan' is not a finite number"),
        ("echo inf > /logs/verifier/reward.txt", "not a finite number"),
        ("echo much > /logs/verifier/reward.txt", "not a finite number"),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", "True is not a finite number"),
        ("echo '{\"score\": 1}' > /logs/verifier/reward.json", 'no key "reward"'),
        ("echo '[1]' > /logs/verifier/reward.json", 'no key "reward"'),
        ("echo '{' > /logs/verifier/reward.json", "not JSON"),
    ],
)
def test_tests_without_a_readable_reward_are_the_tasks_fault(
    test: str, detail: str, bench: Bench, tmp_path: Path
) -> None:
    verdict = bench.grade(task_with(tmp_path / "t", test), doing())
    assert (verdict.reward, verdict.blame) == (None, Blame.TASK)
    assert re.search(detail, verdict.detail), verdict.detail


def test_tests_that_never_end_are_the_tasks_fault(bench: Bench, tmp_path: Path) -> None:
    verdict = bench.grade(task_with(tmp_path / "t", "sleep 60", timeout_s=0.3), doing())
    assert (verdict.reward, verdict.blame) == (None, Blame.TASK)
    assert "limit of 0.3 s" in verdict.detail


SILENT = "[ -e /tests/hint ] && echo 1 > /logs/verifier/reward.txt; exit 0"
"""Leaves a reward only where something of the agent's survived."""


@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier && echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "mkdir -p /tests && touch /tests/hint",
        "mkdir -p evil && echo 1 > evil/reward.txt && mkdir -p /logs && ln -s $PWD/evil /logs/verifier",
        "mkdir -p evil/verifier && echo 1 > evil/verifier/reward.txt && rm -rf /logs && ln -s $PWD/evil /logs",
        "(setsid sh -c 'while mkdir -p /logs/verifier; do echo 1 >/logs/verifier/reward.txt; done' >/dev/null 2>&1 &)",
    ],
)
def test_nothing_that_the_agent_left_is_a_reward(cheat: str, bench: Bench, tmp_path: Path) -> None:
    assert bench.grade(task_with(tmp_path / "t", SILENT), doing(cheat)).reward is None


def test_an_agent_that_breaks_its_sandbox_gets_nothing(bench: Bench, tmp_path: Path) -> None:
    """Else a task would be quarantined for what an attempt did."""
    task = task_with(tmp_path / "t", "echo 1 > /logs/verifier/reward.txt")
    verdict = bench.grade(task, doing("rm -rf /logs; touch /logs"))
    assert (verdict.reward, verdict.blame) == (0.0, Blame.MODEL)
    assert "cannot be graded" in verdict.detail


def test_tests_are_hidden_until_grading(bench: Bench, tmp_path: Path) -> None:
    task = task_with(tmp_path / "t", "[ -e found ] && echo 1 > /logs/verifier/reward.txt")
    assert bench.grade(task, doing("[ -e /tests ] && touch found")).reward is None
