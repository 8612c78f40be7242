"""The ready bank: complete groups in completion order. No policy beyond that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.records import GroupId


@dataclass(slots=True)
class Bank:
    """Insertion order is completion order; a group is in it exactly while it is ready and neither taken nor dropped."""

    _ready: dict[GroupId, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, group: GroupId) -> bool:
        return group in self._ready

    def add(self, group: GroupId, now: float) -> None:
        self._ready[group] = now

    def discard(self, group: GroupId) -> None:
        self._ready.pop(group, None)

    def take(self, groups: Sequence[GroupId]) -> None:
        """They are in a batch now. KeyError if one is not ready."""
        for group in groups:
            del self._ready[group]

    def items(self) -> tuple[tuple[GroupId, float], ...]:
        """(group, when it became ready), oldest first."""
        return tuple(self._ready.items())
