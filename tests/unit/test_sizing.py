"""`window.groups = "auto"`: the sizing rule against its oracles, and a closed loop that must come to rest."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from agentrl.records import AttemptId, GroupId, TaskId, TrajectoryFacts, Version
from agentrl.scheduler.groups import Group, Member, Phase
from agentrl.scheduler.policy import Policy
from agentrl.scheduler.sizing import Limit, Room, Window

POLICY = Policy(
    steps=100, groups=4, siblings=8, window_groups=8, window_attempts=4_096, bound=1_000, auto=True, order="rolling"
)
FLEET = Room(slots=64, kv_tokens=0, sandboxes=4_096)


class Loop:
    """A window in a fleet that does exactly as told: every step the same, no randomness."""

    def __init__(self, policy: Policy = POLICY, room: Room = FLEET) -> None:
        self.policy, self.room = policy, room
        self.window = Window(policy)
        self.now, self.version, self._groups = 0.0, 0, 0
        self.seen: list[int] = []
        self.sizes: list[int] = []

    def group(self, life_s: float, longest: float, facts: TrajectoryFacts) -> Group:
        """Siblings that live life_s, but one that lives so many times as long."""
        members = [Member(i, phase=Phase.DONE, facts=facts) for i in range(self.policy.siblings)]
        for member in members:
            member.life_s = life_s
        members[0].life_s = life_s * longest
        self._groups += 1
        return Group(GroupId(self._groups), TaskId("t"), self.now, members, self.window.groups)

    def step(
        self, *, decode_s: float = 2.0, tool_s: float = 8.0, wait_s: float = 0.0, longest: float = 1.0,
        interval_s: float = 100.0, busy_s: float = 0.001, age: int = 0, queue_s: float = 0.0,
    ) -> None:  # fmt: skip
        life_s = decode_s + queue_s + tool_s + wait_s
        facts = TrajectoryFacts(
            attempt=AttemptId(GroupId(0), 0, 0), reward=0.0, tokens=1_000, generated=100, versions=((Version(0), 100),),
            turns=1, engine_s=decode_s + queue_s, queue_s=queue_s, tool_s=tool_s + wait_s, tool_wait_s=wait_s,
        )  # fmt: skip
        running = min(self.window.attempts, self.window.groups * self.policy.siblings)
        for _ in range(self.policy.groups):
            group = self.group(life_s, longest, facts)
            for member in group.members:
                self.window.ended(facts, member.life_s if longest == 1.0 else life_s)
            self.window.completed(group, self.now + life_s * longest)
            group.members[0].oldest = Version(self.version - age)
            self.window.aged(group, self.version)
        self.window.elapsed(self.now + busy_s, self.policy.groups, 0, running)
        self.window.trainer_ready(self.now + busy_s)
        self.now += interval_s
        self.window.elapsed(self.now, 0, 0, running)
        self.window.cut(self.now, self.room)
        self.version += 1
        self.seen.append(self.window.attempts)
        self.sizes.append(self.window.groups)

    def settle(self, steps: int = 60, **how: float) -> None:
        for _ in range(steps):
            self.step(**how)  # type: ignore[arg-type]

    def limit(self, name: str) -> Limit:
        return next(limit for limit in self.window.limits if limit.name == name)


def test_the_knee_is_slots_over_the_share_that_decodes() -> None:
    """Finite source with 64 slots, 2 s of decoding and 8 s of tools: the knee is 320, and 352 keeps .999 busy."""
    loop = Loop()
    loop.settle()
    assert loop.limit("slots").value == pytest.approx(352)
    assert loop.window.attempts == pytest.approx(352, abs=0.1 * 352)


def test_waiting_for_a_slot_is_no_part_of_a_life() -> None:
    """An overfull fleet measures the same knee as an idle one."""
    loop = Loop()
    loop.settle(queue_s=30.0)
    assert loop.limit("slots").value == pytest.approx(352)


@pytest.mark.parametrize(
    ("drift", "wanted"),
    [
        ({"decode_s": 4.0}, 1.1 * 64 * 12 / 4),  # reasoning gets longer: fewer in flight
        ({"tool_s": 16.0}, 1.1 * 64 * 18 / 2),  # tools get slower: more
    ],
)
def test_it_follows_a_drift_and_rests(drift: dict[str, float], wanted: float) -> None:
    loop = Loop()
    loop.settle()
    before = loop.window.attempts
    loop.settle(**drift)
    assert loop.window.attempts == pytest.approx(wanted, rel=0.11)
    moves = [after - now for now, after in pairwise(loop.seen[60:]) if after != now]
    assert moves, "the drift was seen"
    assert all((move > 0) == (wanted > before) for move in moves), "no step in the other direction"
    assert not any(after - now for now, after in pairwise(loop.seen[-20:])), "at rest"


def test_groups_keep_so_many_conversations_going() -> None:
    """A group stays until its longest sibling ends: C * M_tail / n of them, and the places that the trainer holds."""
    loop = Loop()
    loop.settle(longest=3.0, interval_s=100.0, busy_s=25.0)
    tail = 3.0 / ((3.0 + 7) / 8)
    held = 4 * 0.25
    assert loop.limit("filled").value == pytest.approx(loop.window.attempts * tail / 8 + held)


def test_a_busy_trainer_needs_no_more_than_little_says() -> None:
    loop = Loop()
    loop.settle(tool_s=98.0, busy_s=50.0, interval_s=50.0)
    assert loop.window.limits[0].name == "trainer"
    assert loop.limit("trainer").value == pytest.approx(4 * (1 + 100 / 50) + 4)
    assert loop.window.groups == pytest.approx(16, abs=1.6)


@pytest.mark.parametrize("tail", [1.0, 1.5, 2.0])
def test_the_window_is_as_wide_as_K_allows(tail: float) -> None:
    """Ages in proportion to W/B, as by Little's law: it comes to rest where the oldest reach K."""
    loop = Loop(msgspec.structs.replace(POLICY, bound=8))
    for _ in range(200):
        loop.step(age=min(9, round(tail * loop.window.groups / 4)))
    assert loop.window.limits[0].name == "fresh"
    assert loop.window.groups / 4 * tail == pytest.approx(8, abs=1.5)
    assert len(set(loop.sizes[-50:])) <= 2


def test_until_ages_are_known_K_is_twice_the_versions_that_pass() -> None:
    loop = Loop(msgspec.structs.replace(POLICY, bound=6))
    loop.settle(3)
    assert loop.limit("fresh").value == 6 * 4 / 2


def test_lanes_that_keep_everybody_waiting_are_a_limit() -> None:
    loop = Loop()
    loop.settle(wait_s=10.0)
    assert next(limit.name for limit in loop.window.limits if limit.of == "C") == "lanes"
    assert loop.window.attempts < 0.5 * 352


def test_no_more_than_the_caches_hold() -> None:
    loop = Loop(room=msgspec.structs.replace(FLEET, kv_tokens=50_000))
    loop.settle()
    assert loop.limit("kv").value == 100  # half of 1,000 tokens each on average over their lives
    assert loop.window.attempts == pytest.approx(100, rel=0.11)


def test_no_more_than_there_are_sandboxes() -> None:
    loop = Loop(room=msgspec.structs.replace(FLEET, sandboxes=96))
    loop.settle()
    assert loop.limit("sandboxes").value == 96
    assert loop.window.attempts == pytest.approx(96, rel=0.11)


def test_a_window_of_fixed_size_only_measures() -> None:
    loop = Loop(msgspec.structs.replace(POLICY, auto=False, window_attempts=40))
    loop.settle()
    assert (loop.window.groups, loop.window.attempts) == (8, 40)
    assert loop.limit("slots").value == pytest.approx(352)
