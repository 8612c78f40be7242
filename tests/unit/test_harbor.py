"""The task-folder format: what is read, and how each broken folder is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.errors import TaskError, UserError
from agentrl.tasks import harbor
from agentrl.tasks.harbor import HarborSource

TOML = """\
schema_version = "1.4"
[task]
name = "mine/first"
[metadata]
category = "files"
difficulty = "easy"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 30.0
[environment]
memory_mb = 256
storage = "1G"
env = { MODE = "test" }
"""
DOCKERFILE = """\
# a comment
FROM python:3.11-slim

ENV PYTHONPATH=/app GREETING="hello world"
ENV OLD some words
WORKDIR /app
COPY src/ ./src
COPY a.txt b.txt /data/
COPY ["a.txt", "renamed.txt"]
RUN mkdir -p out && \\
    echo ready > out/state
WORKDIR sub
RUN ["touch", "two words"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "first")


def make(root: Path, toml: str = TOML, dockerfile: str = DOCKERFILE) -> Path:
    files = {
        "task.toml": toml,
        "instruction.md": "Do it.\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "environment/Dockerfile": dockerfile,
        "environment/a.txt": "a",
        "environment/b.txt": "b",
        "environment/src/main.py": "print()",
        "environment/src/deep/x.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_folder_becomes_a_task(folder: Path) -> None:
    task = harbor.load(folder)
    assert (task.id, task.kind, task.instruction) == ("mine/first", "files", "Do it.")
    assert (task.agent_timeout_s, task.verify_timeout_s) == (120.0, 30.0)
    assert (task.limits.memory_mb, task.limits.disk_mb, task.limits.network) == (256, 1024, False)
    assert task.image == "python:3.11-slim"
    assert task.env == {"PYTHONPATH": "/app", "GREETING": "hello world", "OLD": "some words", "MODE": "test"}
    assert task.workdir == "/app/sub"
    assert sorted(task.files) == [
        ("environment/a.txt", "/app/renamed.txt"),
        ("environment/a.txt", "/data/a.txt"),
        ("environment/b.txt", "/data/b.txt"),
        ("environment/src/deep/x.py", "/app/src/deep/x.py"),
        ("environment/src/main.py", "/app/src/main.py"),
    ]
    assert task.setup == (
        "cd / && mkdir -p /app",
        "cd /app && mkdir -p out && echo ready > out/state",
        "touch 'two words'",
    )
    assert not task.trusted


def test_time_outs_have_the_formats_defaults(tmp_path: Path) -> None:
    task = harbor.load(make(tmp_path / "t", toml=""))
    assert (task.id, task.agent_timeout_s, task.verify_timeout_s) == ("t", 600.0, 600.0)


Break = Callable[[Path], object]


def toml(old: str, new: str) -> Break:
    return lambda root: (root / "task.toml").write_text(TOML.replace(old, new))


def dockerfile(line: str) -> Break:
    return lambda root: (root / "environment/Dockerfile").write_text(f"FROM x\n{line}\n")


BROKEN: dict[str, tuple[Break, str]] = {
    "no toml": (lambda root: (root / "task.toml").unlink(), "task.toml is missing"),
    "no instruction": (lambda root: (root / "instruction.md").unlink(), "instruction.md is missing"),
    "empty instruction": (lambda root: (root / "instruction.md").write_text(" \n"), "instruction.md is empty"),
    "binary instruction": (lambda root: (root / "instruction.md").write_bytes(b"\xff\xfe"), "instruction.md.*utf-8"),
    "no tests": (lambda root: (root / "tests/test.sh").unlink(), "tests/test.sh is missing"),
    "no environment": (lambda root: (root / "environment/Dockerfile").unlink(), "environment/Dockerfile is missing"),
    "bad toml": (toml("[agent]", "[agent"), r"task.toml: .*line 7"),
    "wrong type": (toml("timeout_sec = 120", 'timeout_sec = "soon"'), r"got `str` - at `agent.timeout_sec`"),
    "nan": (toml("timeout_sec = 120", "timeout_sec = nan"), "agent.timeout_sec is nan"),
    "infinite": (toml("timeout_sec = 30.0", "timeout_sec = inf"), "verifier.timeout_sec is inf"),
    "zero": (toml("timeout_sec = 120", "timeout_sec = 0"), "> 0.* - at `agent.timeout_sec`"),
    "unknown key": (toml("timeout_sec = 120", "timeout_secs = 120"), "unknown field `timeout_secs`"),
    "no size": (toml('"1G"', '"lots"'), "environment.storage is 'lots'"),
    "other schema": (toml('"1.4"', '"2.0"'), "schema_version is not supported"),
    "gpus": (toml("memory_mb = 256", "gpus = 1"), "environment.gpus is not supported"),
    "steps": (lambda root: (root / "steps").mkdir(), "steps is not supported"),
    "compose": (
        lambda root: (root / "environment/docker-compose.yaml").touch(),
        "docker-compose.yaml needs containers",
    ),
    "verifier image": (lambda root: (root / "tests/Dockerfile").touch(), "tests/Dockerfile needs its own image"),
    "another user": (toml("[verifier]", 'user = "nobody"\n[verifier]'), "agent.user is not supported"),
    "entrypoint": (dockerfile("ENTRYPOINT run"), "Dockerfile:2: ENTRYPOINT is not supported"),
    "two stages": (dockerfile("FROM y"), "Dockerfile:2: a second FROM"),
    "copy of nothing": (dockerfile("COPY missing.txt /x"), "Dockerfile:2: COPY missing.txt: no such file"),
    "copy from above": (dockerfile("COPY ../task.toml /x"), "Dockerfile:2: COPY ../task.toml"),
    "copy flags": (dockerfile("COPY --chown=a a.txt /x"), "Dockerfile:2: COPY with flags"),
    "variable": (dockerfile("WORKDIR $HOME"), r"Dockerfile:2: cannot read the path '\$HOME'"),
    "open quote": (dockerfile("COPY 'a.txt /x"), "Dockerfile:2: No closing quotation"),
    "env": (dockerfile("ENV LONELY"), "Dockerfile:2: cannot read ENV"),
    "json": (dockerfile("RUN [1]"), "Dockerfile:2: cannot read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_clear_error(name: str, folder: Path) -> None:
    spoil, message = BROKEN[name]
    spoil(folder)
    with pytest.raises(TaskError, match=message) as error:
        harbor.load(folder)
    assert str(folder) in str(error.value)
    assert error.value.hint


def test_a_misspelt_key_names_the_nearest(folder: Path) -> None:
    toml("timeout_sec = 120", "timeout_secs = 120")(folder)
    with pytest.raises(TaskError) as error:
        harbor.load(folder)
    assert error.value.hint == "Did you mean timeout_sec?"


def test_a_symlink_in_the_environment_is_refused(folder: Path) -> None:
    (folder / "environment/src/link").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="COPY of the symlink link"):
        harbor.load(folder)


def test_an_empty_folder_is_made(folder: Path) -> None:
    (folder / "environment/src/empty").mkdir()
    assert "cd / && mkdir -p /app/src/empty" in harbor.load(folder).setup


# --- the source -------------------------------------------------------------------------------------------------------


def folders(root: Path, count: int) -> Path:
    for number in range(count):
        make(root / f"t{number}", toml="")
    return root


def test_every_epoch_holds_every_task(tmp_path: Path) -> None:
    source = HarborSource(folders(tmp_path, 5), seed=3)
    epochs = [[task.id for task in source.next_tasks(5)] for _ in range(6)]
    assert all(sorted(epoch) == ["t0", "t1", "t2", "t3", "t4"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "shuffled anew"


def test_skipping_is_the_same_as_taking(tmp_path: Path) -> None:
    first, second = (HarborSource(folders(tmp_path, 5), seed=3) for _ in range(2))
    first.next_tasks(13)
    second.skip(13)
    assert first.next_tasks(9) == second.next_tasks(9)


def test_a_place_without_tasks_is_the_users_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="no task folder"):
            HarborSource(path)


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name)
    with pytest.raises(TaskError, match="both named 'mine/first'"):
        HarborSource(tmp_path)
