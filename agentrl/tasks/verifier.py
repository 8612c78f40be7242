"""Grades an attempt as Harbor does, with the agent's processes gone and the reward read from outside."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

from agentrl.errors import DeadlineError, TaskError
from agentrl.ports import Sandbox
from agentrl.records import Blame, ExecResult, File, Lane, Task, Verdict

# /logs/verifier and /tests are the verifier's: whatever the agent left there goes, links included. One on which the
# sandbox has mounted something cannot be removed, and being empty will do.
_CLEAR = (
    '{ rm -rf /tests /logs/verifier || [ -z "$(ls -A /tests; ls -A /logs/verifier)" ]; } 2>/dev/null'
    " && { [ ! -L /logs ] || rm /logs; } && mkdir -p /logs/verifier"
)
_CLEAR_TIMEOUT_S = 20.0


class HarborVerifier:
    """An agent can break its own sandbox so far that nothing can be graded there: that is its failure, reward 0.
    Tests that time out or leave no readable reward are the task's."""

    async def grade(self, task: Task, sandbox: Sandbox, *, request_id: str) -> Verdict:
        tests = await asyncio.to_thread(_tests, task)
        await sandbox.sweep()
        cleared = await sandbox.exec(
            _CLEAR, timeout_s=_CLEAR_TIMEOUT_S, request_id=f"{request_id}-clear", lane=Lane.VERIFY, cwd="/"
        )
        if cleared.timed_out:
            raise DeadlineError(f"{task.id}: clearing {sandbox.id} for the tests took over {_CLEAR_TIMEOUT_S:g} s")
        if cleared.exit_code != 0:
            broken = f"the agent left a sandbox that cannot be graded: {cleared.output.strip()[-200:]}"
            return _verdict(0.0, cleared, blame=Blame.MODEL, detail=broken)
        await sandbox.put(tests, request_id=f"{request_id}-tests")
        ran = await sandbox.exec(
            _command(tests), timeout_s=task.verify_timeout_s, request_id=f"{request_id}-run", lane=Lane.VERIFY
        )
        if ran.timed_out or ran.oom:
            limit = f"{task.verify_timeout_s:g} s" if ran.timed_out else f"{task.limits.memory_mb} MB"
            detail = f"{task.root}/tests/test.sh passed its limit of {limit}"
            return _verdict(None, cleared, ran, blame=Blame.TASK, detail=detail)
        try:
            return _verdict(await _reward(sandbox), cleared, ran)
        except TaskError as err:
            detail = f"{task.root}/tests/test.sh (exit {ran.exit_code}): {err}; it printed {ran.output[-200:]!r}"
            return _verdict(None, cleared, ran, blame=Blame.TASK, detail=detail)


def _tests(task: Task) -> dict[str, File]:
    root = Path(task.root) / "tests"
    files = {
        f"/tests/{path.relative_to(root).as_posix()}": File(data=path.read_bytes(), mode=path.stat().st_mode & 0o777)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    if "/tests/test.sh" not in files:
        raise TaskError(f"{root}: test.sh is missing", hint="Restore the task folder.")
    return files


def _command(tests: dict[str, File]) -> str:
    """bash unless the script says that sh will do, which starts in a third of the time."""
    first = tests["/tests/test.sh"].data.split(b"\n", 1)[0]
    return "exec sh /tests/test.sh" if first.split() == [b"#!/bin/sh"] else "exec bash /tests/test.sh"


async def _reward(sandbox: Sandbox) -> float:
    try:
        text = await sandbox.get("/logs/verifier/reward.json")
    except FileNotFoundError:
        try:
            text = await sandbox.get("/logs/verifier/reward.txt")
        except FileNotFoundError:
            raise TaskError("it left no reward.json and no reward.txt in /logs/verifier") from None
        return _number(text.decode(errors="replace").strip())
    try:
        value = json.loads(text)
    except ValueError as err:
        raise TaskError(f"reward.json is not JSON ({err})") from err
    if not isinstance(value, dict) or "reward" not in value:
        raise TaskError('reward.json has no key "reward"')
    return _number(value["reward"])


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise TaskError(f"the reward {value!r} is not a finite number")
    return number


def _verdict(reward: float | None, *steps: ExecResult, blame: Blame | None = None, detail: str = "") -> Verdict:
    return Verdict(
        reward=reward,
        blame=blame,
        detail=detail,
        verify_s=sum(step.run_s for step in steps),
        queue_s=sum(step.queue_s for step in steps),
    )
