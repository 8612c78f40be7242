"""What one attempt is told and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.ports import Engine, Journal, Placement, SandboxHost, Verifier
from agentrl.records import AttemptId, GroupId, Place, Record, Sampling, Task, Turn, Version


class Order(Record):
    """One attempt to play. Times are durations in seconds.

    sampling: of one turn; the template's stop tokens are added. resume: start from what the journal holds.
    """

    attempt: AttemptId
    task: Task
    sampling: Sampling
    context_tokens: int  # prompt and reply together
    max_turns: int  # the task's own wins where it has one
    label: str  # the run, on the sandbox's lease
    parse_limit: int = 3
    observation_chars: int = 1_000
    system: str = ""  # empty: observation.SYSTEM
    lease_s: float = 600.0
    request_timeout_s: float = 120.0  # one engine call
    move_timeout_s: float = 120.0  # until another engine is named for a lost one
    deadline_s: float = 300.0  # the whole attempt; passing it is an infra fault
    resume: bool = False
    regenerate: bool = False  # a turn whose call was aborted is sampled anew from its start, its partial tokens lost


class Template(Protocol):
    """What the turn loop needs of `template.ChatTemplate`."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def opening(self, system: str, instruction: str) -> list[int]: ...

    def observation(self, text: str, *, after: int) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Openings:
    """Which places have already computed a group's opening. Shared by all attempts of a run, for the statistics of
    prefix reuse. Bounded: the oldest groups are forgotten first."""

    def __init__(self, limit: int = 4_096) -> None:
        self._limit = limit
        self._computed: dict[tuple[GroupId, Place], None] = {}

    def computed(self, group: GroupId, place: Place) -> None:
        self._computed[group, place] = None
        if len(self._computed) > self._limit:
            del self._computed[next(iter(self._computed))]

    def knows(self, group: GroupId, place: Place) -> bool:
        return (group, place) in self._computed


Later = Callable[[Coroutine[None, None, None]], object]


def _unheard_version(version: Version) -> None: ...


def _unheard_turn(turn: Turn) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The world of one attempt. The caller owns and closes all of it.

    clock: seconds of the run. new_rid: 32 hex digits, never twice.
    began: called once, with the version of the first sampled token. turn_done: after each durable turn.
    later: takes over what need not be waited for once the trajectory is durable, the sandbox's return; None: it is
    waited for.
    """

    engines: Mapping[str, Engine]
    placement: Placement
    sandboxes: SandboxHost
    verifier: Verifier
    journal: Journal
    template: Template
    clock: Callable[[], float]
    new_rid: Callable[[], str]
    began: Callable[[Version], None] = _unheard_version
    turn_done: Callable[[Turn], None] = _unheard_turn
    later: Later | None = None
    openings: Openings = field(default_factory=Openings)
