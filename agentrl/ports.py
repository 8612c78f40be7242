"""The seam: who needs what, nothing else. Adapters implement these, `runtime` and `rollout` use them.

Every call has a deadline and raises a typed error of `agentrl.errors`; none of them retries in a way that could do
work twice. Cancelling a call releases what it held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from agentrl.records import (
    AttemptId,
    Batch,
    EngineInfo,
    ExecResult,
    File,
    Lane,
    LoadReport,
    Place,
    RankLoad,
    Reply,
    Sampling,
    SandboxHostStatus,
    StepReport,
    Task,
    Trajectory,
    TurnPayload,
    Verdict,
    Version,
    WeightsManifest,
)


class Engine(Protocol):
    """One serving engine (one process group, one or more data-parallel ranks)."""

    @property
    def name(self) -> str: ...

    async def info(self, *, deadline_s: float) -> EngineInfo:
        """Identity, proven by the server itself. EngineLost where it does not answer or is not what it should be."""
        ...

    async def ready(self, *, deadline_s: float) -> bool:
        """Whether it would serve a request now (not paused, not loading)."""
        ...

    async def generate(
        self, rid: str, tokens: Sequence[int], sampling: Sampling, *, rank: int, deadline_s: float
    ) -> Reply:
        """Sample a continuation of `tokens` on data-parallel rank `rank`.

        rid: 32 hex digits, never reused. A cancelled or timed-out call aborts the request on the engine.
        Raises EngineLost, DeadlineError. A reply whose finish is "abort" carries the partial tokens.
        """
        ...

    async def abort(self, rid: str, *, deadline_s: float) -> None: ...

    async def loads(self, *, deadline_s: float) -> list[RankLoad]: ...

    async def generated_tokens(self, *, deadline_s: float) -> int:
        """Tokens sampled since the engine started: the proof that it keeps producing."""
        ...

    async def stage(self, path: str, version: Version, *, deadline_s: float) -> float:
        """Bring the weights near the engine (copy, checksum, page cache) while it serves. Returns seconds. deadline_s:
        of what the engine itself does then; bringing ends by itself where it makes no progress."""
        ...

    async def swap(
        self, path: str, version: Version, *, deadline_s: float, regenerate: bool = False, grace_s: float = 0.0
    ) -> LoadReport:
        """Pause, load, continue; running requests go on with their own KV and a new version span.

        regenerate: calls that have not ended after grace_s (in which no new one is sent) end with finish "abort"
        instead, and what they had sampled counts as lost.
        Ends only when the engine has proved that it holds `version`.
        """
        ...

    async def pause(self, *, deadline_s: float) -> None: ...

    async def resume(self, *, deadline_s: float) -> None: ...

    async def aclose(self) -> None: ...


class Sandbox(Protocol):
    """One leased workspace. All calls carry a request id and are idempotent under it."""

    @property
    def id(self) -> str: ...

    @property
    def opened(self) -> tuple[float, float]:
        """(seconds its opening waited for a place and a lane, seconds it then took), by the host's own clock."""
        ...

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
        """Run `command` with `sh -c` (bash where there is one). lane None: the daemon's detector chooses command or
        package. The time-out kills the whole tree and is data (`timed_out`), not an error. Raises SandboxLost."""
        ...

    async def put(self, files: Mapping[str, File], *, request_id: str) -> None:
        """Write absolute paths, parents made as needed. In the verify lane: it is for grading."""
        ...

    async def get(self, path: str, *, limit: int = 65_536) -> bytes:
        """The file's first `limit` bytes, read from outside. FileNotFoundError where there is none."""
        ...

    async def sweep(self) -> int:
        """Kill every process of the sandbox but its init; how many there were. Before grading, in the verify lane."""
        ...

    async def close(self) -> None:
        """Give the lease back: processes killed, storage freed, in the cleanup lane. Idempotent."""
        ...


class SandboxHost(Protocol):
    @property
    def name(self) -> str: ...

    async def open(self, task: Task, *, label: str, lease_s: float, request_id: str) -> Sandbox:
        """A fresh workspace with the task's files in place and its set-up run (reset lane).

        Raises TaskError where the task's set-up fails, SandboxLost or UnavailableError where the host does.
        """
        ...

    async def status(self, *, deadline_s: float) -> SandboxHostStatus: ...

    async def aclose(self) -> None: ...


class Verifier(Protocol):
    async def grade(self, task: Task, sandbox: Sandbox, *, request_id: str) -> Verdict:
        """Sweep, copy the hidden tests in, run them in the verify lane, read the reward from outside.

        Broken tests are a Verdict with blame task; a lost sandbox raises SandboxLost.
        """
        ...


class TaskSource(Protocol):
    def next_tasks(self, count: int) -> list[Task]:
        """The next `count` tasks of a seeded, endless order. Pure in (seed, position)."""
        ...

    def skip(self, count: int) -> None:
        """Move past tasks that a resumed run has already been offered."""
        ...


class Journal(Protocol):
    """Durable before it counts. Writes queue in order and commit in groups; `await`ed calls return once durable."""

    def record_event(self, now: float, event: bytes, commands: bytes) -> None:
        """Queue one scheduler event, with a digest of the commands it led to (`scheduler.commands.digest`)."""
        ...

    def record_turn(self, attempt: AttemptId, payload: TurnPayload) -> None:
        """Queue one finished turn, so that the conversation can be resumed from it."""
        ...

    def forget(self, attempt: AttemptId) -> None:
        """Queue: the attempt was dropped, its turns may go."""
        ...

    def adopt(self, earlier: Sequence[AttemptId], attempt: AttemptId) -> None:
        """Queue: what earlier tries of the same sibling left durable (turns, or a whole trajectory) is `attempt`'s."""
        ...

    def discard(self, attempts: Sequence[AttemptId]) -> None:
        """Queue: these trajectories will not be asked for again."""
        ...

    async def turns(self, attempt: AttemptId) -> list[TurnPayload]:
        """The durable turns of an unfinished attempt, in order."""
        ...

    async def kept(self, attempt: AttemptId) -> Trajectory | None:
        """The trajectory, if this attempt was kept: a run that died between `keep` and the news of it finds it here."""
        ...

    async def keep(self, trajectory: Trajectory) -> None:
        """Returns once the trajectory (and all that was queued before it) is on disk."""
        ...

    async def flush(self) -> None: ...

    async def load(self, attempts: Sequence[AttemptId]) -> list[Trajectory]:
        """Payloads, in the order asked. DataError where one is missing or damaged."""
        ...

    async def aclose(self) -> None: ...


class Trainer(Protocol):
    async def wait_ready(self) -> Version:
        """Returns, each time the trainer comes to ask for work, with the version it holds."""
        ...

    async def step(self, batch: Batch) -> StepReport:
        """One optimizer step; the new version's weights are complete in the store when it returns.

        Idempotent by batch id: a trainer that already took it answers with the same report.
        """
        ...

    async def aclose(self) -> None: ...


class WeightStore(Protocol):
    def path(self, version: Version) -> str:
        """Folder of a complete version. DataError where it is absent or damaged."""
        ...

    def latest(self) -> Version | None: ...

    def prune(self, keep: int, pinned: Sequence[Version] = ()) -> None: ...


class WeightInbox(Protocol):
    """Weights of a trainer that shares no disk with the run."""

    async def offer(self, manifest: WeightsManifest) -> dict[str, int]:
        """Bytes that are there of each file that is not whole; empty: the version is complete in the store. Raises
        UserError, UnavailableError (no room), DataError (damaged: send all of it again)."""
        ...

    async def receive(self, name: str, offset: int, pieces: AsyncIterator[bytes]) -> int:
        """Appends, if the file has `offset` bytes now; the bytes it has afterwards."""
        ...


class Process(Protocol):
    """A started process group. Ends with its host's connection policy, never orphaned by ours."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM to the group, SIGKILL after grace_s. Idempotent."""
        ...


class Host(Protocol):
    """A machine on which things can be run: this one, or one behind SSH. Every path is a name on that machine.

    Calls raise UnavailableError where the machine cannot be reached, DeadlineError where it does not answer in time.
    """

    @property
    def name(self) -> str: ...

    @property
    def python(self) -> str:
        """The interpreter there that has agentrl installed."""
        ...

    @property
    def home(self) -> str:
        """Absolute folder there below which agentrl keeps its things."""
        ...

    @property
    def local(self) -> bool:
        """Whether its paths are this machine's paths."""
        ...

    @property
    def up(self) -> bool:
        """Whether it can be reached now."""
        ...

    async def wait_link(self, *, up: bool) -> str:
        """Returns once the host can (up) or cannot (not up) be reached, with the reason in words. For whoever depends
        on it: a lost host is known here before its processes are missed. Waits for ever where that never comes."""
        ...

    async def start(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str] | None = None, label: str = ""
    ) -> Process:
        """Start without a shell, output appended to the file `log`. A leftover of the same label and log is ended
        first: of two runs on one machine each has its own.

        UnavailableError where there is no such program, UserError where the log cannot be written.
        """
        ...

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> tuple[int, str]:
        """Exit code and combined output. DeadlineError after timeout_s, with the program killed."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o600) -> None:
        """Replaced atomically; folders on the way are made with mode 0700. UserError where it cannot be written."""
        ...

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """The first `limit` bytes. FileNotFoundError where there is none, UserError where it is not readable."""
        ...

    async def send(
        self, source: str, path: str, *, deadline_s: float, moved: Callable[[int], None] | None = None
    ) -> None:
        """Copy a file or folder of this machine to `path` there, which then holds exactly that. deadline_s: without a
        byte that moves. moved: hears how many more have. UserError where one side cannot be read or written."""
        ...

    async def reach(self, address: str) -> str:
        """An address here, of the same kind, that reaches `address` there until `aclose`, whatever the link does
        meanwhile: "HOST:PORT" (on its loopback) or "unix:/path". While the link is down, calls fail at once."""
        ...

    async def free_port(self) -> int:
        """A TCP port of its loopback that was free a moment ago."""
        ...

    async def aclose(self) -> None:
        """Ends what `reach` gave, and the link. Processes live on as their host's policy says."""
        ...


class Placement(Protocol):
    """Where an attempt's next turn goes. The scheduler moves it; the turn loop reads it before each call."""

    @property
    def place(self) -> Place: ...

    async def wait_moved(self, away_from: Place, *, deadline_s: float) -> Place:
        """After the engine at `away_from` was lost: the next place. DeadlineError where none is given in time."""
        ...


class Progress(Protocol):
    """Hears how long work goes on. For people only: nothing depends on it."""

    def __call__(self, who: str, what: str, share: float | None = None) -> None:
        """`who` is at `what` now. share: done, of the whole; None: unknown."""
        ...
