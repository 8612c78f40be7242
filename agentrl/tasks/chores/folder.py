"""Writes a chore as a task folder in the Harbor format, so that it takes the same road as anybody's own tasks."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from random import Random

from agentrl.errors import UserError
from agentrl.tasks.chores.kinds import KINDS, Chore

_TASK_TOML = """\
schema_version = "1.0"

[task]
name = "chores/{name}"

[metadata]
kind = "{kind}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 20.0

[environment]
memory_mb = 128
storage_mb = 16
allow_internet = false
"""

_TEST_SH = """\
#!/bin/sh
# Reward: the share of goals reached, nothing where something that had to stay is broken.
holds() {{ [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }}
gone() {{ [ ! -e "$1" ] && [ ! -L "$1" ]; }}
reward() {{ echo "$1" > /logs/verifier/reward.txt; exit 0; }}

{wait}cd /work || reward 0
{keeps}
reached=0
{goals}
case $reached in
{cases}
esac
"""


_WAIT_SIGMA = 1.0  # standard deviation of the logarithm: that of test suites in the simulated fleet (assumed)
_WAIT_MOST_S = 15.0  # within the verifier's time-out


def chore(kind: str, seed: int) -> Chore:
    """The problem `seed` of a kind, pure in both. UserError where there is no such kind."""
    if kind not in KINDS:
        raise UserError(f"there is no chore {kind!r}", hint=f"Use one of: {', '.join(KINDS)}.")
    return KINDS[kind](Random(f"{kind}/{seed}"))


def demo(kind: str, seed: int) -> list[str]:
    """The commands that solve it, one a turn."""
    return list(chore(kind, seed).script)


def wait_of(kind: str, seed: int, median_s: float) -> float:
    """Seconds that the hidden tests of problem `seed` wait, where the median problem's wait `median_s`."""
    drawn = median_s * math.exp(_WAIT_SIGMA * Random(f"{kind}/{seed}/wait").gauss(0.0, 1.0))
    return min(_WAIT_MOST_S, drawn)


def generate(kind: str, seed: int, root: Path, *, tests_wait_s: float = 0.0) -> Path:
    """Write problem `seed` of `kind` to `root/kind-seed` (complete or absent) and return that folder.

    tests_wait_s: as the recipe's key. Do not vary it within one root.
    """
    problem = chore(kind, seed)
    folder = root / f"{kind}-{seed:04d}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    wait_s = wait_of(kind, seed, tests_wait_s)
    _write(scratch, kind, problem, folder.name, wait_s)
    scratch.chmod(0o755)
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)
        if not folder.is_dir():
            raise
    return folder


def _write(folder: Path, kind: str, problem: Chore, name: str, wait_s: float) -> None:
    environment = folder / "environment"
    docker = ["FROM debian:bookworm-slim", "WORKDIR /work"]
    for path, file in sorted(problem.files.items()):
        target = environment / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(file.mode)
    if problem.files:
        docker.append("COPY files/ /work/")
    _text(folder / "task.toml", _TASK_TOML.format(name=name, kind=kind))
    _text(folder / "instruction.md", problem.instruction + "\n")
    _text(environment / "Dockerfile", "\n".join(docker) + "\n")
    _text(folder / "tests" / "test.sh", _test(problem, wait_s), mode=0o755)
    _text(folder / "solution" / "solve.sh", "\n".join(["#!/bin/sh", "set -e", *problem.script]) + "\n", mode=0o755)


def _test(problem: Chore, wait_s: float) -> str:
    total = len(problem.goals)
    return _TEST_SH.format(
        wait=f"sleep {wait_s:.3f}\n" if wait_s else "",
        keeps="\n".join(f"{{ {keep}; }} || reward 0" for keep in problem.keeps),
        goals="\n".join(f"{{ {goal}; }} && reached=$((reached + 1))" for goal in problem.goals),
        cases="\n".join(f"  {n}) reward {n / total:.3g} ;;" for n in range(total + 1)),
    )


def _text(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)  # whatever the umask
