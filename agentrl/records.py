"""The nouns. Frozen, keyword-only, no behaviour beyond derived facts; every field says its unit or shape.

Ids never repeat within a run: a group's id is its admission ticket, an attempt's id holds its try number, so a late
answer from try 1 can never settle try 2.

Token positions index the whole transcript (prompt, replies and observations in order). Ranges are half-open.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple, NewType, dataclass_transform

import msgspec

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", int)
Version = NewType("Version", int)
"""Policy version: 0 is the initial policy, each optimizer step makes the next one."""


class AttemptId(NamedTuple):
    """One try of one sibling: `g7.m3.t0` is the first try of member 3 of group 7."""

    group: GroupId
    member: int
    attempt: int

    def __str__(self) -> str:
        return f"g{self.group}.m{self.member}.t{self.attempt}"


class Place(NamedTuple):
    """Where a conversation's history lives: an engine and one of its data-parallel ranks."""

    engine: str
    rank: int

    def __str__(self) -> str:
        return f"{self.engine}/{self.rank}"


class Blame(StrEnum):
    """Whose fault a failure is. Only `model` may ever become a reward."""

    MODEL = "model"  # data: a parse failure, context overflow, a wrong answer
    INFRA = "infra"  # a host, engine, sandbox or network failed: retry
    TASK = "task"  # the task itself is broken: drop the group, quarantine the task
    USER = "user"  # the recipe or the command line: stop and say so
    BUG = "bug"  # ours: stop


class Lane(StrEnum):
    """The five kinds of sandbox work, each with its own concurrency cap and CPU set."""

    RESET = "reset"
    COMMAND = "command"
    PACKAGE = "package"
    VERIFY = "verify"
    CLEANUP = "cleanup"


class Stop(StrEnum):
    """Why a trajectory ended. All of these are data, none is a failure of ours."""

    SUBMITTED = "submitted"  # the model gave its final answer
    TURN_LIMIT = "turn_limit"
    CONTEXT_FULL = "context_full"
    PARSE_LIMIT = "parse_limit"  # too many malformed replies in a row
    TIME_LIMIT = "time_limit"  # the task's own agent time-out


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: immutable, strict on the wire."""


# --- tasks --------------------------------------------------------------------------------------------------------


class Limits(Record):
    """What one sandbox may use. The backend enforces every one or refuses the sandbox."""

    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 256
    output_bytes: int = 16_384  # kept head and tail of one command's output
    network: bool = False


class Task(Record):
    """One problem, in the terms of the Harbor/Terminal-Bench folder it came from.

    `root` is the task's folder on the controller. `environment/` there builds the workspace, `tests/` is copied into
    the sandbox only at grading, `solution/` only by the oracle.
    """

    id: TaskId
    kind: str  # the family, for statistics
    instruction: str
    root: str
    workdir: str = "/work"  # empty: the image's own
    env: dict[str, str] = {}
    setup: tuple[str, ...] = ()  # shell lines run once in the reset lane after the files are in place
    files: tuple[tuple[str, str], ...] = ()  # (path under root, absolute path in the sandbox), before `setup`
    limits: Limits = Limits()
    trusted: bool = False  # may run in the `process` backend, which isolates nothing
    image: str = ""  # for a backend of containers; empty: the recipe's
    command_timeout_s: float = 20.0
    agent_timeout_s: float = 300.0
    verify_timeout_s: float = 60.0
    max_turns: int = 0  # 0: the recipe's


# --- engine ---------------------------------------------------------------------------------------------------------


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`version` produced the tokens [start, end)."""

    start: int
    end: int
    version: Version


class Sampling(Record):
    """Sampling with temperature 1 and top-p 1 makes the engine's logprobs the true behaviour logprobs."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


class Reply(Record):
    """What one engine call returned.

    tokens: sampled ids, a matched stop token included. logprobs: natural log, one per token.
    spans: over the index of `tokens`, contiguous and complete. finish: stop | length | abort.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    rank: int
    queue_s: float = 0.0  # by the engine's own clock, as are the next two; 0 where it does not say
    prefill_s: float = 0.0
    decode_s: float = 0.0


class EngineInfo(Record):
    """What an engine proved about itself."""

    kind: str  # "sglang" | "embedded"
    software: str  # version of the server
    version: Version  # policy version it holds
    ranks: int
    slots: int  # running requests it admits, all ranks together
    context_tokens: int
    kv_tokens: int  # capacity, all ranks together


class RankLoad(Record):
    rank: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_total_tokens: int


class LoadReport(Record):
    """One engine's weight change. pause_s: time in which it generated nothing. lost_tokens: discarded by it."""

    version: Version
    stage_s: float
    pause_s: float
    lost_tokens: int = 0
    checksum: str = ""


# --- sandbox --------------------------------------------------------------------------------------------------------


class File(Record):
    data: bytes
    mode: int = 0o644


class ExecResult(Record):
    """exit_code is None where the command was killed (timed_out or oom says why).

    output: stdout and stderr as they came, head and tail kept; total_bytes counts all of it.
    """

    exit_code: int | None
    output: str
    total_bytes: int = 0
    truncated: bool = False
    timed_out: bool = False
    oom: bool = False
    lane: Lane = Lane.COMMAND
    lane_reason: str = ""
    queue_s: float = 0.0  # waited for the lane
    run_s: float = 0.0


class LaneStatus(Record):
    lane: Lane
    cap: int
    running: int
    queued: int
    cpus: tuple[int, ...]
    merged_with: tuple[Lane, ...] = ()  # lanes that share these CPUs because the host has too few
    wait_s_mean: float = 0.0
    wait_s_p95: float = 0.0  # of the last few hundred
    done: int = 0


class SandboxHostStatus(Record):
    name: str
    backend: str
    isolation: str  # one line, what it does and does not contain
    live: int
    lanes: tuple[LaneStatus, ...]


# --- trajectories -----------------------------------------------------------------------------------------------------


class Turn(Record):
    """One engine call and the command it led to. Durable before the next one counts."""

    index: int
    start: int  # transcript position of the first sampled token
    end: int  # one past the last sampled token
    observed_end: int  # one past the observation that followed
    place: Place
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int  # prompt tokens that an earlier turn of this attempt or a sibling had already computed here
    command: str | None = None
    exit_code: int | None = None
    output_sha: str = ""  # of the observation text, to check a replayed sandbox
    lane: Lane | None = None
    began_s: float = 0.0  # run clock, when the engine call was made
    engine_s: float = 0.0  # wall time of the engine call; queue, prefill, decode by the engine's clock are parts of it
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tool_wait_s: float = 0.0
    tool_s: float = 0.0
    parse_error: str = ""
    regenerated: int = 0  # times this turn's generation was lost and sampled again


class TurnPayload(Record, kw_only=True):
    """A finished turn with its tokens: enough to resume the conversation after any process died.

    opening: the prompt's ids, on turn 0 only. reply and logprobs: what the engine sampled. spans index `reply`.
    observed: ids appended after the reply, generation prompt of the next turn included.
    """

    turn: Turn
    opening: tuple[int, ...] = ()
    reply: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    observed: tuple[int, ...] = ()


class Verdict(Record):
    """reward is None exactly when the attempt could not be graded; then blame says whose fault."""

    reward: float | None
    blame: Blame | None = None
    detail: str = ""
    verify_s: float = 0.0
    queue_s: float = 0.0


class Trajectory(Record):
    """A finished attempt: all that training and audit need. tokens, trainable and logprobs have equal length.

    trainable[i] says that the model sampled token i; logprobs[i] is the engine's own there and 0.0 elsewhere.
    spans cover exactly the trainable tokens, in order.
    """

    attempt: AttemptId
    task: TaskId
    kind: str
    tokens: tuple[int, ...]
    trainable: tuple[bool, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    turns: tuple[Turn, ...]
    stop: Stop
    verdict: Verdict
    began_s: float
    ended_s: float
    open_wait_s: float = 0.0  # by the sandbox host's own clock, as the next: for a place and the reset lane
    open_s: float = 0.0

    @property
    def facts(self) -> TrajectoryFacts:
        ages: dict[Version, int] = {}
        for span in self.spans:
            ages[span.version] = ages.get(span.version, 0) + span.end - span.start
        return TrajectoryFacts(
            attempt=self.attempt,
            reward=self.verdict.reward if self.verdict.reward is not None else 0.0,
            tokens=len(self.tokens),
            generated=sum(self.trainable),
            versions=tuple(sorted(ages.items())),
            turns=len(self.turns),
            tool_s=sum(t.tool_wait_s + t.tool_s for t in self.turns),
            **{name: sum(getattr(turn, name) for turn in self.turns) for name in _SUMMED},
            open_wait_s=self.open_wait_s,
            open_s=self.open_s,
            verify_wait_s=self.verdict.queue_s,
            verify_s=self.verdict.verify_s,
            stop=self.stop,
        )


class TrajectoryFacts(Record):
    """What the scheduler knows of a finished attempt. No tokens."""

    attempt: AttemptId
    reward: float
    tokens: int  # whole transcript
    generated: int  # sampled by the model
    versions: tuple[tuple[Version, int], ...]  # (version, trainable tokens), ascending
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reusable_tokens: int = 0
    regenerated: int = 0
    engine_s: float = 0.0  # sum over turns; with tool_s it gives the share of time that a conversation decodes
    queue_s: float = 0.0  # of engine_s, as is prefill_s; what is left of it is decoding
    prefill_s: float = 0.0
    tool_s: float = 0.0  # waiting for a lane included: tool_wait_s
    tool_wait_s: float = 0.0
    open_wait_s: float = 0.0
    open_s: float = 0.0
    verify_wait_s: float = 0.0
    verify_s: float = 0.0
    stop: Stop = Stop.SUBMITTED

    @property
    def oldest(self) -> Version:
        return self.versions[0][0]


_SUMMED = sorted({*Turn.__struct_fields__} & {*TrajectoryFacts.__struct_fields__} - {"tool_s"})  # over the turns


# --- batches ----------------------------------------------------------------------------------------------------------


class GroupProof(Record):
    """The audit of a group: version - oldest is its age, at most `bound`. tokens: (version, trained), ascending."""

    group: GroupId
    oldest: Version
    tokens: tuple[tuple[Version, int], ...]
    masked: int = 0  # tokens that are too old and train nothing; `oldest` is of those that do


class Batch(Record):
    """What one optimizer step trains on: complete groups, whole or not at all.

    version: the policy the trainer holds when it takes this batch; the step makes version + 1.
    bound: K, the largest allowed age. proofs: one per group. trajectories: all siblings of all groups.
    """

    id: int
    version: Version
    bound: int
    proofs: tuple[GroupProof, ...]
    trajectories: tuple[Trajectory, ...]


class StepReport(Record):
    """What the trainer says of one step. metrics: name to figure, free to grow."""

    batch: int
    version: Version  # the version this step made; its weights are complete in the store
    seconds: float
    metrics: dict[str, float] = {}


class WeightsManifest(Record):
    """Beside the safetensors of one version. files: (name, sha256, bytes)."""

    version: Version
    files: tuple[tuple[str, str, int], ...]
    extra: dict[str, Any] = {}
