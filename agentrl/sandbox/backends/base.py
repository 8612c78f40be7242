"""What the daemon needs of a backend. One contract suite (`tests/contract/test_backend.py`) holds all of them to it.

A box is one workspace: a file system, a process tree, limits. The daemon decides *when* and *on which CPUs* a command
runs; the backend only runs it. Nothing here falls back to something weaker: a backend that cannot enforce a limit
raises UnavailableError from `probe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.records import ExecResult, File, Limits, Record


class BoxSpec(Record):
    """id: [a-z0-9-], unique for ever. label: the run, so that a reaper of one run never touches another's."""

    id: str
    label: str
    limits: Limits
    workdir: str = "/work"  # empty: the image's own
    env: dict[str, str] = {}
    trusted: bool = False
    image: str = ""
    cpus: tuple[int, ...] = ()  # initial CPU set


class Box(Protocol):
    @property
    def id(self) -> str: ...

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cpus: tuple[int, ...],
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        output_bytes: int = 0,
    ) -> ExecResult:
        """Run with a shell, stdin closed, in its own session, on `cpus`. At the time-out or on cancellation the whole
        tree is killed, setsid grandchildren too. SandboxLost where the box is gone. Commands of one box run one at a
        time or side by side as the caller likes."""
        ...

    async def set_cpus(self, cpus: tuple[int, ...]) -> None:
        """Move what runs now: one cpuset write."""
        ...

    async def put(self, files: Mapping[str, File]) -> None: ...

    async def get(self, path: str, limit: int) -> bytes: ...

    async def sweep(self) -> int:
        """SIGKILL every process but the init; how many there were."""
        ...

    async def reset(self) -> None:
        """Back to the state right after `start`: processes gone, every write gone."""
        ...

    async def kill(self) -> None:
        """Everything gone: processes, mounts, cgroups, storage. Idempotent."""
        ...


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def isolation(self) -> str:
        """One line: what it contains and what not."""
        ...

    async def probe(self) -> None:
        """UnavailableError with the missing capability and the remedy where it cannot work here."""
        ...

    async def start(self, spec: BoxSpec) -> Box: ...

    async def reap(self, label: str | None = None) -> int:
        """Remove what dead daemons left behind (of one run, or of all whose owner is gone). How many boxes."""
        ...

    async def aclose(self) -> None: ...
