"""Facts in. Each is small, frozen, and on the wire as tagged JSON: a run's journal is (now, event), and replaying it
through a fresh core gives the same commands. News may come late, twice, or out of order; ids tell."""

from __future__ import annotations

import msgspec

from agentrl.records import (
    AttemptId,
    Blame,
    RankLoad,
    Record,
    SandboxHostStatus,
    TaskId,
    TrajectoryFacts,
    Version,
)


class EngineUp(Record, tag=True):
    """`engine` proved that it serves `version`. slots and kv_tokens are of one rank. host: where it runs; empty: here.

    epoch counts the engine's incarnations: news of an earlier one is ignored.
    """

    engine: str
    epoch: int
    version: Version
    ranks: int
    slots: int
    kv_tokens: int
    host: str = ""


class EngineDown(Record, tag=True):
    """link: the host that cannot be reached, where that is why."""

    engine: str
    epoch: int
    reason: str
    link: str = ""


class EngineLoads(Record, tag=True):
    """What the engine says of its own queues, for routing."""

    engine: str
    epoch: int
    loads: tuple[RankLoad, ...]


class SandboxHostUp(Record, tag=True):
    host: str
    capacity: int


class SandboxHostDown(Record, tag=True):
    """link: as of EngineDown."""

    host: str
    reason: str
    link: str = ""


class SandboxHostLoads(Record, tag=True):
    """What the host says of its lanes. Nothing is decided by it: it is what a recording shows."""

    host: str
    said: SandboxHostStatus


class TaskOffered(Record, tag=True):
    """kind: the task's family, for statistics."""

    task: TaskId
    kind: str = ""


class AttemptBegan(Record, tag=True):
    """The first trainable token of the attempt exists and is of `oldest`."""

    attempt: AttemptId
    oldest: Version


class AttemptEnded(Record, tag=True):
    """The trajectory is durable and graded."""

    facts: TrajectoryFacts


class AttemptFailed(Record, tag=True):
    """resumable: its durable turns can be carried over to the next try."""

    attempt: AttemptId
    blame: Blame
    detail: str
    resumable: bool = False


class TrainerReady(Record, tag=True):
    """The trainer holds `version` and waits for a batch."""

    version: Version


class TrainerDown(Record, tag=True):
    reason: str


class StepFinished(Record, tag=True):
    """The optimizer step on `batch` made `version`; its weights are complete in the store."""

    batch: int
    version: Version
    seconds: float


class EngineStaged(Record, tag=True):
    engine: str
    epoch: int
    version: Version


class EngineLoaded(Record, tag=True):
    """The engine proved that it holds `version` and serves again."""

    engine: str
    epoch: int
    version: Version


class EngineLoadFailed(Record, tag=True):
    engine: str
    epoch: int
    version: Version
    detail: str


class WeightsOffered(Record, tag=True):
    """Somebody put a newer version into the store by hand: it is the one to serve and to train from."""

    version: Version


class Progressed(Record, tag=True):
    """Turns were finished since the last event. Sent at most once in a few seconds; keeps the stall watch quiet."""

    turns: int


class Resumed(Record, tag=True):
    """A new process took over: whatever was running is gone, nothing durable is."""

    steps: int


class PauseAsked(Record, tag=True):
    """on: no new attempts and no new batches until it is off again."""

    on: bool


class DrainAsked(Record, tag=True):
    """Stop soon and leave a resumable run: the running optimizer step and its publication end, attempts are cancelled
    with their durable turns kept."""


class Tick(Record, tag=True):
    """Only time has passed."""


Event = (
    EngineUp
    | EngineDown
    | EngineLoads
    | SandboxHostUp
    | SandboxHostDown
    | SandboxHostLoads
    | TaskOffered
    | AttemptBegan
    | AttemptEnded
    | AttemptFailed
    | TrainerReady
    | TrainerDown
    | StepFinished
    | EngineStaged
    | EngineLoaded
    | EngineLoadFailed
    | WeightsOffered
    | Progressed
    | Resumed
    | PauseAsked
    | DrainAsked
    | Tick
)

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event)


def decode(data: bytes) -> Event:
    return _decoder.decode(data)
