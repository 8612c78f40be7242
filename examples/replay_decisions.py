"""The scheduler by hand: a few facts go in, orders come out. No process, no clock, no file.

    python examples/replay_decisions.py

Two engines, one sandbox host, a trainer; one batch of one group with two siblings, K = 1. One sibling fails once and is
tried again under a new id. After the step both engines take the new weights, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from agentrl.records import AttemptId, Blame, GroupId, Place, TaskId, TrajectoryFacts, Version
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.laws import Laws
from agentrl.scheduler.policy import Policy

POLICY = Policy(steps=1, groups=1, siblings=2, window_groups=2, window_attempts=2, bound=1)
V0, V1 = Version(0), Version(1)


def attempt(member: int, number: int) -> AttemptId:
    return AttemptId(GroupId(0), member, number)


def ended(member: int, number: int, reward: float) -> news.AttemptEnded:
    facts = TrajectoryFacts(
        attempt=attempt(member, number), reward=reward, tokens=300, generated=40, versions=((V0, 40),), turns=2
    )
    return news.AttemptEnded(facts=facts)


def up(name: str) -> news.EngineUp:
    return news.EngineUp(engine=name, epoch=0, version=V0, ranks=1, slots=8, kv_tokens=8_000)


STORY: tuple[tuple[float, news.Event], ...] = (
    (0.0, up("e0")),
    (0.0, up("e1")),
    (0.1, news.SandboxHostUp(host="local", capacity=8)),
    (0.2, news.TrainerReady(version=V0)),
    (0.3, news.TaskOffered(task=TaskId("sort-names"))),
    (1.0, news.AttemptBegan(attempt=attempt(0, 0), oldest=V0)),
    (4.0, ended(0, 0, reward=1.0)),
    (5.0, news.AttemptFailed(attempt=attempt(1, 0), blame=Blame.INFRA, detail="SandboxLost", resumable=True)),
    (5.3, news.Tick()),  # it rests 0.25 s before the next try
    (6.0, news.AttemptFailed(attempt=attempt(1, 0), blame=Blame.INFRA, detail="SandboxLost")),  # late, and said twice
    (9.0, ended(1, 1, reward=0.0)),
    (11.0, news.StepFinished(batch=0, version=V1, seconds=2.0)),
    (11.1, news.EngineStaged(engine="e1", epoch=0, version=V1)),
    (11.2, news.EngineStaged(engine="e0", epoch=0, version=V1)),
    (11.5, news.EngineLoaded(engine="e1", epoch=0, version=V1)),
    (11.9, news.EngineLoaded(engine="e0", epoch=0, version=V1)),
)


def told(value: object) -> str:
    """In one line; of a record, its name and what is not a default."""
    if isinstance(value, AttemptId | Place | str):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(told, value))})"
    if not isinstance(value, msgspec.Struct):
        return str(value)
    fields = [(field.name, getattr(value, field.name), field.default) for field in msgspec.structs.fields(value)]
    shown = [f"{name}={told(held)}" for name, held, default in fields if held != default]
    return f"{type(value).__name__}({', '.join(shown)})"


def play() -> Iterator[str]:
    core, laws = Core(POLICY), Laws()
    for now, event in STORY:
        yield f"{now:5.1f} s  {told(event)}"
        commands = core.handle(event, now)
        laws.check(core, commands)
        yield from (f"           -> {told(command)}" for command in commands)
    book = core.ledger
    yield f"ledger: {book.admitted} admitted, {book.trained} trained, {book.dropped.total()} dropped; {book.late} late"


if __name__ == "__main__":
    for line in play():
        print(line)
