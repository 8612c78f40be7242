"""How much work is offered: the window W in groups and C in conversations; under `window.groups = "auto"` both are set
at every cut from what the run has measured. The least of these limits holds, and is the reason that is shown:

    C  slots      decode slots over the share of its life that a conversation occupies one: the knee of the operational
                  bound min(C / life, slots / decoding) (Denning and Buzen 1978); more only wait
       lanes      twice those that do not wait for one: these do not grow any more once a lane is full
       kv         what the KV caches hold of them at their mean length; more are evicted and prefilled again
       sandboxes  what the hosts take, or the recipe's `window.attempts`
    W  filled     C * M_tail / n keep C conversations going, M_tail = E[longest sibling] / E[sibling], for a group stays
                  until its slowest sibling ends; and the places that training, publication and a ready batch hold
       trainer    B * residence / (time the trainer needs) are in flight by Little's law when it never waits; and those
                  places. More only age in the bank
       fresh      versions that pass over a group are proportional to W / B (Little). W is such that the oldest
                  2 % of groups still meet K

No limit follows W itself, so there is nothing to swing about: waits are left out of lives, ages are per W / B. (How
long groups stay does grow with W once slots or lanes are full; there these are the smaller limits.) What is measured is
smoothed, a change of less than a tenth is not made, and none is larger than a quarter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from agentrl.records import Record, TrajectoryFacts
from agentrl.scheduler.groups import Group
from agentrl.scheduler.policy import Policy

_BEYOND_KNEE = 1.1  # at the knee itself randomness leaves slots idle: 3 % of 64; a tenth more, 0.1 % (finite source)
_QUEUED = 0.25  # share of lives spent waiting for lanes below which lanes are no limit
_CROWDED = 0.5  # share that is enough: the queue never runs empty
_FRESH = 0.98  # of groups that must meet K
_AGES = 16  # batches whose ages are remembered
_STILL = 0.1  # changes below this share are not made
_STEP = 1.25  # the largest change at once


class Limit(Record):
    """One limit and the figures behind it. of: W (groups) or C (conversations)."""

    of: str
    name: str
    value: float
    said: str


class Room(Record):
    """What the fleet has now. kv_tokens: of all ranks, 0: not known."""

    slots: int
    kv_tokens: int
    sandboxes: int


class _Mean:
    """Exponentially weighted; None before the first sample."""

    def __init__(self, memory: float) -> None:
        self._weight = 1 / memory
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + self._weight * (sample - self.value)


class Window:
    """groups, attempts: W and C as they are. They may be less than what is in use, for a while: nothing is taken back.

    The rest is memory of what was measured; times are those of the events, so that a replay sizes as the run did.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.groups = policy.window_groups
        self.attempts = policy.window_attempts
        self.limits: tuple[Limit, ...] = ()  # as of the last cut: those of W, least first, then those of C
        if policy.auto:
            self.attempts = min(self.attempts, policy.window_groups * (policy.siblings + policy.spare))
        batch = policy.groups
        self._slot_s, self._wait_s, self._life_s, self._kv = (_Mean(2 * batch * policy.siblings) for _ in range(4))
        self._longest_s, self._sibling_s, self._stay_s = (_Mean(4 * batch) for _ in range(3))
        self._busy_s, self._held, self._bank, self._running = (_Mean(3) for _ in range(4))
        self._ages: deque[float] = deque(maxlen=_AGES * batch)  # per W / B
        self._sums = [0.0, 0.0, 0.0]  # seconds times held places, ready groups, conversations, since the last cut
        self._at = self._cut_at = 0.0
        self._stepping = False  # a batch was cut and the trainer has not asked for the next one

    # --- what happens -------------------------------------------------------------------------------------------------

    def elapsed(self, now: float, held: int, bank: int, running: int) -> None:
        """Until now, so many places were held by training and publication, so many groups ready and so on."""
        passed, self._at = now - self._at, now
        for index, level in enumerate((held, bank, running)):
            self._sums[index] += passed * level

    def ended(self, facts: TrajectoryFacts, life_s: float) -> None:
        """life_s: from its first start to its end."""
        slot_s = facts.engine_s - facts.queue_s
        wait_s = facts.tool_wait_s + facts.open_wait_s + facts.verify_wait_s
        self._slot_s.add(slot_s)
        self._wait_s.add(wait_s)
        self._life_s.add(max(life_s - facts.queue_s - wait_s, slot_s))
        self._kv.add((facts.tokens + facts.prompt_tokens / max(1, facts.turns)) / 2)

    def completed(self, group: Group, now: float) -> None:
        lives = [m.life_s for m in group.members if m.facts is not None]
        self._longest_s.add(max(lives))
        self._sibling_s.add(sum(lives) / len(lives))
        self._stay_s.add(now - group.admitted)

    def aged(self, group: Group, version: int) -> None:
        """It is trained at `version`, or dropped there for being too old."""
        per = group.window / self._policy.groups
        if version >= 2 * per and group.floor is not None:  # before, nothing can have grown old yet
            self._ages.append((version - group.floor) / per)

    def trainer_ready(self, now: float) -> None:
        if self._stepping:
            self._busy_s.add(now - self._cut_at)
        self._stepping = False

    def cut(self, now: float, room: Room) -> None:
        """A batch is cut: look at what passed since the last one, and size anew."""
        passed = now - self._cut_at
        if self._cut_at and passed > 0:
            for mean, total in zip((self._held, self._bank, self._running), self._sums, strict=True):
                mean.add(total / passed)
            if self._life_s.value:
                self._size(room)
        self._cut_at, self._sums, self._stepping = now, [0.0, 0.0, 0.0], True

    # --- what follows -------------------------------------------------------------------------------------------------

    def _size(self, room: Room) -> None:
        policy = self._policy
        least = policy.groups * (policy.siblings + policy.spare)
        slots = sorted(self._conversations(room), key=lambda limit: limit.value)
        attempts = min(policy.window_attempts, max(least, _moved(self.attempts, slots[0].value)))
        groups = sorted(self._places(attempts), key=lambda limit: limit.value)
        self.limits = (*groups, *slots)
        if not policy.auto:
            return
        self.attempts = attempts
        self.groups = max(policy.groups, policy.round_groups, _moved(self.groups, groups[0].value))

    def _conversations(self, room: Room) -> Iterable[Limit]:
        life = self._life_s.value or 0.0
        share = (self._slot_s.value or 0.0) / life
        wait_s = self._wait_s.value or 0.0
        if share > 0:
            said = f"{room.slots} slots, in one for {share:.0%} of a life"
            yield Limit(of="C", name="slots", value=_BEYOND_KNEE * room.slots / share, said=said)
        waits = wait_s / (life + wait_s)
        if waits > _QUEUED:
            running = self._running.value or 0.0
            said = f"of {running:.0f} in flight {waits:.0%} wait for a lane"
            yield Limit(of="C", name="lanes", value=running * (1 - waits) / (1 - _CROWDED), said=said)
        if room.kv_tokens and self._kv.value:
            said = f"{room.kv_tokens} tokens of KV, {self._kv.value:.0f} a conversation"
            yield Limit(of="C", name="kv", value=room.kv_tokens / self._kv.value, said=said)
        most = min(self._policy.window_attempts, room.sandboxes)
        yield Limit(
            of="C", name="sandboxes", value=float(most), said=f"{room.sandboxes} sandboxes, window.attempts {most}"
        )

    def _places(self, attempts: int) -> Iterable[Limit]:
        batch, siblings = self._policy.groups, self._policy.siblings
        held = self._held.value or 0.0
        ready = min(self._bank.value or 0.0, batch)
        if self._sibling_s.value:
            tail = (self._longest_s.value or 0.0) / self._sibling_s.value
            said = f"{attempts} conversations, a group takes {tail:.1f} of their lives"
            yield Limit(of="W", name="filled", value=attempts * tail / siblings + held + ready, said=said)
        if self._busy_s.value and self._stay_s.value:
            said = f"a step takes {self._busy_s.value:.3g} s, a group {self._stay_s.value:.3g} s"
            yield Limit(
                of="W", name="trainer", value=batch * (1 + self._stay_s.value / self._busy_s.value) + held, said=said
            )
        if len(self._ages) < 2 * batch:
            yield Limit(
                of="W", name="fresh", value=self._policy.bound * batch / 2, said="no ages are known yet: K is twice W/B"
            )
        else:
            tail = max(sorted(self._ages)[math.ceil(_FRESH * len(self._ages)) - 1], 0.5)
            said = f"the oldest 2 % of groups see {tail:.2f} W/B versions, K is {self._policy.bound}"
            yield Limit(of="W", name="fresh", value=self._policy.bound * batch / tail, said=said)


def _moved(value: int, wanted: float) -> int:
    """One step from value towards what is wanted."""
    if abs(wanted - value) < max(1.0, _STILL * value):
        return value
    if wanted > value:
        return min(math.floor(wanted), math.ceil(value * _STEP))
    return max(math.ceil(wanted), math.floor(value / _STEP))
