"""Plays commands for real: one box a conversation, the task's own tests at the end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from agentrl.errors import TaskError
from agentrl.recipe.schema import Sandbox
from agentrl.records import ExecResult, File, Lane, Task
from agentrl.rollout.observation import render
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.backends.base import Backend, Box, BoxSpec
from agentrl.tasks import harbor
from agentrl.tasks.chores import generate
from agentrl.tasks.verifier import HarborVerifier

_LABEL = "tiny-policy"


class World:
    """`async with World(...)`: boxes are started at need, reset between attempts, removed at the end."""

    def __init__(self, folder: Path, *, backend: str) -> None:
        self._folder = folder
        self._backend: Backend = make_backend(Sandbox(backend=backend), state_dir=str(folder / "boxes"))
        self._free: list[Box] = []
        self._started = 0

    async def __aenter__(self) -> World:
        await self._backend.probe()
        return self

    async def __aexit__(self, *_: object) -> None:
        for box in self._free:
            await box.kill()
        await self._backend.aclose()

    @contextlib.asynccontextmanager
    async def room(self, kind: str, seed: int) -> AsyncIterator[Room]:
        """A box with the task's files in place, for one attempt."""
        task = harbor.load(generate(kind, seed, self._folder / "tasks"))
        if self._free:
            box = self._free.pop()
            await box.reset()
        else:
            self._started += 1
            spec = BoxSpec(id=f"tiny-{self._started}", label=_LABEL, limits=task.limits, workdir=task.workdir)
            box = await self._backend.start(spec)
        try:
            await box.put({target: _file(Path(task.root) / source) for source, target in task.files})
            yield Room(task, box)
        finally:
            self._free.append(box)


class Room:
    def __init__(self, task: Task, box: Box) -> None:
        self.task = task
        self._box = box

    async def run(self, command: str) -> str:
        """What the model is shown of it."""
        return render(await self._box.exec(command, timeout_s=5.0, cpus=(), output_bytes=2_000), 400)

    async def reward(self) -> float:
        verdict = await HarborVerifier().grade(self.task, _Lent(self._box), request_id="grade")
        if verdict.reward is None:
            raise TaskError(f"{self.task.id}: {verdict.detail}", hint="Correct the chore's tests.")
        return verdict.reward


def _file(path: Path) -> File:
    return File(data=path.read_bytes(), mode=path.stat().st_mode & 0o777)


class _Lent:
    """A box as the verifier's sandbox: no daemon, no lanes."""

    def __init__(self, box: Box) -> None:
        self._box = box

    @property
    def id(self) -> str:
        return self._box.id

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        request_id: str,
        lane: Lane | None = None,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        return await self._box.exec(command, timeout_s=timeout_s, cpus=(), cwd=cwd, env=env)

    async def put(self, files: Mapping[str, File], *, request_id: str) -> None:
        await self._box.put(files)

    async def get(self, path: str, *, limit: int = 65_536) -> bytes:
        return await self._box.get(path, limit)

    async def sweep(self) -> int:
        return await self._box.sweep()

    async def close(self) -> None:
        await self._box.kill()
