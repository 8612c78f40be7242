"""No group waits for ever, whatever the order of admission: who waits goes before whoever is not open yet, so that each
can be overtaken only by the tries of those that were open with it."""

from __future__ import annotations

import random

import msgspec
import pytest

from agentrl.records import GroupId
from agentrl.scheduler import admission, cut
from agentrl.scheduler import commands as orders
from agentrl.scheduler.core import Core
from agentrl.scheduler.groups import Phase
from agentrl.wiring.sim import draw_policy
from tests.laws.world import World

ADMISSIONS = ("fifo", "frontier", "shortest-group", "longest-first", "expiry")


def waiting(core: Core) -> set[GroupId]:
    """Groups with a sibling that could start now; one that rests after a fault could not."""
    return {
        group
        for group, members in core.table.waiting.items()
        if group in core.table.groups
        and any(core.table.groups[group].members[i].phase is Phase.WAITING for i in members)
    }


class Watched(World):
    """How many starts each waiting group saw go to others, before one of its own."""

    def __init__(self, seed: int, order: str, *, trouble: float, core: type[Core] = Core) -> None:
        drawn = draw_policy(random.Random(seed))
        rounds = {"when_stale": "drop", "mode": "async", "round_groups": 0, "steps": 12}
        super().__init__(
            seed, trouble=trouble, policy=msgspec.structs.replace(drawn, admission=order, **rounds), core=core
        )
        self.passed_over: dict[GroupId, int] = {}
        self.opened: set[GroupId] = set()
        self.most = self.newest = 0
        self.waited = False

    def obey(self, command: orders.Command) -> None:
        if isinstance(command, orders.StartAttempt):
            self._started(command.attempt.group)
        super().obey(command)

    def _started(self, group: GroupId) -> None:
        still = waiting(self.core)
        self.waited |= bool(still - {group})
        if group not in self.opened:
            self.opened.add(group)
            older = {other for other in still if other < group}
            assert not older, f"group {group} was opened while {sorted(older)} waited"
        self.passed_over.pop(group, None)
        for other in still - {group}:
            self.passed_over[other] = self.passed_over.get(other, 0) + 1
            self.most = max(self.most, self.passed_over[other])

    @property
    def bound(self) -> int:
        """Every sibling of every other open group starts once."""
        return (self.policy.window_groups - 1) * (self.policy.siblings + self.policy.spare)


@pytest.mark.parametrize("order", ADMISSIONS)
def test_a_waiting_group_is_overtaken_only_by_those_open_with_it(order: str) -> None:
    waited = 0
    for seed in range(6):
        world = Watched(seed, order, trouble=0.0)
        world.run()
        waited += world.waited
        if world.policy.in_flight != "restart":  # there a start may be one of the same sibling's many
            assert world.most <= world.bound, f"seed {seed}: passed over {world.most} times, bound {world.bound}"
    assert waited


@pytest.mark.parametrize("order", ADMISSIONS)
def test_none_opens_before_who_waits_in_a_rude_world_either(order: str) -> None:
    for seed in range(2):
        Watched(seed, order, trouble=1.0).run()


def test_a_core_that_opens_groups_early_and_starts_the_newest_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Eager(Core):
        def _start(self, now: float) -> None:
            while cut.may_admit(self) and self._admit(now):
                pass
            super()._start(now)

    monkeypatch.setattr(admission, "key_of", lambda state, now: lambda group: (-group.id,))
    worlds = [Watched(seed, "fifo", trouble=0.0, core=Eager) for seed in range(10)]
    with pytest.raises(AssertionError, match="was opened while"):
        [world.run() for world in worlds]
