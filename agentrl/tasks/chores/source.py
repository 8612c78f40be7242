"""Chores as a task source."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.errors import UserError
from agentrl.records import Task
from agentrl.tasks import harbor
from agentrl.tasks.chores.folder import generate
from agentrl.tasks.chores.kinds import KINDS
from agentrl.tasks.order import EndlessOrder


class ChoresSource:
    """Every round offers each kind once, in a fresh order, so that any stretch of a run sees an even mix.

    Folders are written below `root` when first offered. Problem seeds are 0..instances-1; the warm start of the
    shipped policy draws its own from elsewhere, so these are new to it.
    """

    def __init__(
        self,
        root: Path,
        *,
        kinds: tuple[str, ...] = (),
        instances: int = 64,
        seed: int = 0,
        tests_wait_s: float = 0.0,
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise UserError(f"tasks.kinds: no chore {unknown[0]!r}", hint=f"Choose from: {', '.join(KINDS)}.")
        self._root = root
        self._tests_wait_s = tests_wait_s
        self._kinds = kinds or tuple(KINDS)
        self._rounds = EndlessOrder(instances, f"{seed}/instances")
        self._mix = EndlessOrder(len(self._kinds), f"{seed}/kinds")
        self._position = 0

    def next_tasks(self, count: int) -> list[Task]:
        first, self._position = self._position, self._position + count
        return [self._task(position) for position in range(first, first + count)]

    def skip(self, count: int) -> None:
        self._position += count

    def _task(self, position: int) -> Task:
        kind = self._kinds[self._mix.at(position)]
        instance = self._rounds.at(position // len(self._kinds))
        task = harbor.load(generate(kind, instance, self._root, tests_wait_s=self._tests_wait_s))
        # No chore needs isolation to be safe: all paths are relative to a workspace of a few tiny files. And none needs
        # an image of its own: any with a shell will do.
        return msgspec.structs.replace(task, trusted=True, image="")
