"""The one staleness rule and the two fences that keep it (docs/laws.md, law 2).

age = version the trainer holds - version of the oldest trainable token. A batch may hold no group whose age exceeds K.

Fence 1, at admission, saves work: a group is not begun if, taking its turn after all that is open before it, it would
be too old even with its first token sampled now. Fence 2, at every new version and whenever an older
token becomes known, is the guarantee.
"""

from __future__ import annotations

from agentrl.records import Version


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
