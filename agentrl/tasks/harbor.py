"""Harbor / Terminal-Bench task folders, with one image or none.

    task.toml         names, time-outs, limits (schema 1.x; `[metadata]` is free-form)
    instruction.md    what the agent is told
    environment/      Dockerfile and what it copies (see dockerfile.py)
    tests/test.sh     grades, writes /logs/verifier/reward.json or reward.txt; unseen by the agent
    solution/solve.sh the oracle's way, optional

A folder that asks for more than the sandbox would give is refused by name, never run half.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomli
from msgspec import Meta

from agentrl.errors import TaskError, UserError
from agentrl.records import Limits, Record, Task, TaskId
from agentrl.tasks import dockerfile
from agentrl.tasks.images import tag_of
from agentrl.tasks.order import EndlessOrder

_Seconds = Annotated[float, Meta(gt=0)]
_Megabytes = Annotated[int, Meta(ge=1)]
_NEEDS_IMAGE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


class _Naming(Record):
    name: str = ""
    version: str = ""
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []


class _Agent(Record):
    timeout_sec: _Seconds = 600.0
    user: str = "root"


class _Verifier(Record):
    timeout_sec: _Seconds = 600.0
    user: str = "root"
    env: dict[str, str] = {}
    environment_mode: str = "shared"
    collect: list[Any] = []


class _Environment(Record):
    build_timeout_sec: _Seconds = 600.0
    docker_image: str = ""
    os: str = "linux"
    cpus: Annotated[float, Meta(gt=0)] = 1.0  # read and left: lanes own the CPUs
    memory_mb: _Megabytes = Limits().memory_mb
    storage_mb: _Megabytes = Limits().disk_mb
    memory: str = ""
    storage: str = ""
    gpus: int = 0
    gpu_types: list[str] = []
    tpu: Any = None
    allow_internet: bool = False
    env: dict[str, str] = {}
    workdir: str = ""
    healthcheck: Any = None
    mcp_servers: list[Any] = []
    skills_dir: str = ""


class _TaskToml(Record):
    schema_version: str = "1.0"
    version: str = ""
    task: _Naming = _Naming()
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: dict[str, Any] = {}
    source: str = ""
    steps: list[Any] = []
    artifacts: list[Any] = []


def load(folder: Path, *, images: bool = False) -> Task:
    """Read one task folder. TaskError names the file, the key or line, and the remedy.

    images: the sandboxes are containers, so the Dockerfile is the engine's to build (`images.tag_of`), or
    `environment.docker_image` stands in its place; and the image's own working folder and environment count. Otherwise
    the Dockerfile is read here, as far as it can be followed without an image.
    """
    _require(folder)
    spec = _toml(folder / "task.toml")
    _refuse_unsupported(folder, spec)
    instruction = _text(folder / "instruction.md").strip()
    if not instruction:
        raise TaskError(f"{folder / 'instruction.md'} is empty", hint="Write what the agent has to do.")
    box = spec.environment
    if images:
        name = box.docker_image or tag_of(folder / "environment")
        place = dockerfile.Environment(image=name, workdir="", env={}, files=(), setup=())
    else:
        place = dockerfile.read(folder / "environment" / "Dockerfile")
    return Task(
        id=TaskId(spec.task.name or folder.name),
        kind=str(spec.metadata.get("kind") or spec.metadata.get("category") or "harbor"),
        instruction=instruction,
        root=str(folder.absolute()),
        workdir=box.workdir or place.workdir,
        env={**place.env, **box.env},
        setup=place.setup,
        files=tuple((f"environment/{source}", target) for source, target in place.files),
        limits=Limits(
            memory_mb=_megabytes(folder, "memory", box.memory) or box.memory_mb,
            disk_mb=_megabytes(folder, "storage", box.storage) or box.storage_mb,
            network=box.allow_internet,
        ),
        image=place.image,
        agent_timeout_s=spec.agent.timeout_sec,
        verify_timeout_s=spec.verifier.timeout_sec,
    )


class HarborSource:
    """All task folders directly below `path`, in a seeded endless order, shuffled anew each epoch."""

    def __init__(self, path: Path, *, seed: int = 0, images: bool = False) -> None:
        folders = sorted(p.parent for p in path.glob("*/task.toml")) if path.is_dir() else []
        if not folders:
            raise UserError(f"tasks.path: no task folder below {path}", hint="Point it at a folder of task folders.")
        self.tasks = [load(folder, images=images) for folder in folders]
        seen: dict[str, str] = {}
        for task in self.tasks:
            if task.id in seen:
                raise TaskError(f"{task.root} and {seen[task.id]} are both named {task.id!r}", hint="Rename one.")
            seen[task.id] = task.root
        self._order = EndlessOrder(len(self.tasks), seed)

    def next_tasks(self, count: int) -> list[Task]:
        return [self.tasks[index] for index in self._order.take(count)]

    def skip(self, count: int) -> None:
        self._order.skip(count)


# --- reading ----------------------------------------------------------------------------------------------------------


def _require(folder: Path) -> None:
    if not folder.is_dir():
        raise TaskError(f"{folder} is not a folder", hint="Name a task folder.")
    for name in ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh"):
        if not (folder / name).is_file():
            raise TaskError(f"{folder}: {name} is missing", hint=f"Add {name}, or remove the folder.")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise TaskError(f"{path}: {err}", hint="Make it a readable UTF-8 file.") from err


def _toml(path: Path) -> _TaskToml:
    try:
        table = tomli.loads(_text(path))
    except tomli.TOMLDecodeError as err:
        raise TaskError(f"{path}: {err}", hint="Correct the TOML.") from err
    _finite(path, table, "")
    try:
        return msgspec.convert(table, _TaskToml)
    except msgspec.ValidationError as err:
        message = str(err).replace("`$.", "`").replace("Object contains unknown", "unknown")
        raise TaskError(f"{path}: {message}", hint=_nearest(message)) from err


def _nearest(message: str) -> str:
    unknown = re.search(r"unknown field `(\w+)`", message)
    if not unknown:
        return "Give it a value of that type and range."
    known = {name for section in _SECTIONS for name in section.__struct_fields__}
    near = difflib.get_close_matches(unknown[1], sorted(known), n=1)
    return f"Did you mean {near[0]}?" if near else "Remove it: nothing here would honour it."


_SECTIONS: tuple[type[Record], ...] = (_TaskToml, _Naming, _Agent, _Verifier, _Environment)


def _finite(path: Path, value: object, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"{path}: {key} is {value}", hint="Write a finite number.")
    if isinstance(value, dict):
        for name, inner in value.items():
            _finite(path, inner, f"{key}.{name}".lstrip("."))


def _refuse_unsupported(folder: Path, spec: _TaskToml) -> None:
    environment, verifier = spec.environment, spec.verifier
    compose = [name for name in _NEEDS_IMAGE if (folder / "environment" / name).exists()]
    asked = {
        "schema_version": not spec.schema_version.startswith("1."),
        "steps": bool(spec.steps) or (folder / "steps").exists(),
        "environment.gpus": environment.gpus != 0 or bool(environment.gpu_types) or environment.tpu is not None,
        "environment.os": environment.os != "linux",
        "environment.healthcheck": environment.healthcheck is not None,
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.skills_dir": bool(environment.skills_dir),
        "agent.user": spec.agent.user != "root",
        "verifier.user": verifier.user != "root",
        "verifier.env": bool(verifier.env),
        "verifier.environment_mode": verifier.environment_mode != "shared",
        "verifier.collect": bool(verifier.collect),
    }
    for key, needed in asked.items():
        if needed:
            raise TaskError(f"{folder / 'task.toml'}: {key} is not supported", hint="Remove it, or leave the task out.")
    if compose:
        raise TaskError(f"{folder}: environment/{compose[0]} needs containers", hint="Use one Dockerfile alone.")
    if (folder / "tests" / "Dockerfile").exists():
        raise TaskError(f"{folder}: tests/Dockerfile needs its own image", hint="Grade with tests/test.sh alone.")


def _megabytes(folder: Path, key: str, text: str) -> int:
    """Older files write "2G" or "512M". 0 where nothing is given."""
    if not text:
        return 0
    match = re.fullmatch(r"(\d+)\s*([MG])i?B?", text.strip(), re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise TaskError(f"{folder / 'task.toml'}: environment.{key} is {text!r}", hint='Write it like "512M" or "2G".')
    return int(match[1]) * (1024 if match[2].upper() == "G" else 1)
