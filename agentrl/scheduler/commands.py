"""Orders out. The driver turns each into a port call; the only way back is an event."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from agentrl.records import AttemptId, GroupId, GroupProof, Place, Record, TaskId, Version


class PullTasks(Record, tag=True):
    count: int


class StartAttempt(Record, tag=True):
    """resume: an earlier try of the same sibling whose durable turns are carried over."""

    attempt: AttemptId
    task: TaskId
    place: Place
    host: str
    deadline_s: float
    resume: AttemptId | None = None


class CancelAttempt(Record, tag=True):
    """The core has already forgotten the attempt; keep: its durable turns will be resumed."""

    attempt: AttemptId
    reason: str
    keep: bool = False


class MoveAttempt(Record, tag=True):
    """The attempt's next turn goes to `place`."""

    attempt: AttemptId
    place: Place


class TrainOn(Record, tag=True):
    """One optimizer step on these trajectories, from `version` to version + 1. `bound` is K.

    mask: tokens older than K stay in the conversation and train nothing.
    """

    batch: int
    version: Version
    bound: int
    proofs: tuple[GroupProof, ...]
    attempts: tuple[AttemptId, ...]
    mask: bool = False


class StageWeights(Record, tag=True):
    engine: str
    epoch: int
    version: Version


class SwapWeights(Record, tag=True):
    engine: str
    epoch: int
    version: Version


class RestartEngine(Record, tag=True):
    engine: str
    epoch: int
    reason: str


class DropGroup(Record, tag=True):
    """The group's story is over without training; its payloads may go."""

    group: GroupId
    reason: str
    attempts: tuple[AttemptId, ...]


class Finish(Record, tag=True):
    """The run is over. outcome: done | drained | failed | no-progress. detail names who or what."""

    outcome: str
    detail: str = ""


Command = (
    PullTasks
    | StartAttempt
    | CancelAttempt
    | MoveAttempt
    | TrainOn
    | StageWeights
    | SwapWeights
    | RestartEngine
    | DropGroup
    | Finish
)


def encode(commands: Sequence[Command]) -> bytes:
    return msgspec.json.encode(commands)


def digest(commands: Sequence[Command]) -> bytes:
    """8 bytes that tell one list of commands from another: kept beside each journalled event, compared in a replay."""
    return hashlib.blake2b(encode(commands), digest_size=8).digest()
