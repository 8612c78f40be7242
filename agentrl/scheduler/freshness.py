"""The one staleness rule and the two fences that keep it (docs/laws.md, law 2).

age = version the trainer holds - version of the oldest trainable token. A batch may hold no group whose age exceeds K.

Fence 1, at admission, saves work: a group is not begun if, taking its turn after all that is open before it, it would
be too old even with its first token sampled now. Fence 2, at every new version and whenever an older
token becomes known, is the guarantee.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.records import GroupId, GroupProof, TrajectoryFacts, Version


def age(trainer: Version, oldest: Version) -> int:
    return trainer - oldest


def is_stale(trainer: Version, oldest: Version, bound: int) -> bool:
    return age(trainer, oldest) > bound


def admits(*, open_groups: int, batch_groups: int, stepping: bool, trainer: Version, live: Version, bound: int) -> bool:
    """Whether a group begun now can still be fresh when its turn comes.

    `open_groups` groups are ahead of it, so open_groups // batch_groups steps (and the one that runs) come before the
    batch it falls in; its oldest token will be of version `live`, the oldest that any engine serves.
    """
    at_cut = trainer + (1 if stepping else 0) + open_groups // batch_groups
    return at_cut - live <= bound


def can_follow(floors: Sequence[int], batch_groups: int, trainer: int, bound: int) -> bool:
    """Whether groups with these oldest versions, ascending, can be trained in that order, `batch_groups` a step, none
    too old at its turn. trainer: the version at the first of these steps. (Earliest deadline first is optimal: if this
    order fails, every order does.)"""
    return all(trainer + place // batch_groups - floor <= bound for place, floor in enumerate(floors))


def proof(group: GroupId, facts: Sequence[TrajectoryFacts], floor: int | None) -> GroupProof:
    """The audit of a complete group. floor: tokens of older versions are masked, None: none is."""
    counts: Counter[Version] = Counter()
    for version, count in (pair for f in facts for pair in f.versions):
        counts[version] += count
    trained = tuple(sorted((v, count) for v, count in counts.items() if floor is None or v >= floor))
    masked = counts.total() - sum(count for _, count in trained)
    return GroupProof(group=group, oldest=trained[0][0], tokens=trained, masked=masked)
