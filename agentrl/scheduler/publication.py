"""Which engine should load which version now.

Weights are staged on every engine at once while it serves; then engines swap: one at a time (`rolling`, those with
least open work first, never more than max_unavailable), or all together once all are staged (`all`). An engine that
serves nothing yet (just restarted, behind) may swap at any time: it costs nobody.

Where conversations are to finish under the policy that they began with (`finish`: one version a trajectory), an engine
first drains: it is given nothing new, and swaps when it is empty, or at its deadline with what is left going on under
the new weights (counted as a fallback). A draining engine counts as unavailable.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.records import Version
from agentrl.scheduler.routing import Engine


def to_stage(engines: Iterable[Engine], target: Version) -> list[Engine]:
    return [
        e for e in engines if e.version < target and e.staged != target and e.staging is None and e.swapping is None
    ]


def to_swap(engines: Iterable[Engine], target: Version, *, order: str, max_unavailable: int) -> list[Engine]:
    """Engines to swap now, in order. Every engine ends at `target`; versions only grow."""
    engines = list(engines)
    behind = [e for e in engines if e.version < target]
    ready = [e for e in behind if e.staged == target and e.swapping is None and e.draining is None]
    idle = [e for e in ready if not e.admitted]
    serving = sorted((e for e in ready if e.admitted), key=lambda e: (e.open_work, e.name))
    if order == "all":
        waiting = [e for e in behind if e.admitted and e.staged != target and e.swapping is None]
        return idle + ([] if waiting else serving)
    swapping = sum(1 for e in engines if e.admitted and (e.swapping is not None or e.draining is not None))
    return idle + serving[: max(0, max_unavailable - swapping)]


def is_published(engines: Iterable[Engine], target: Version) -> bool:
    """Every engine that is up holds `target`."""
    return all(e.version >= target and e.swapping is None for e in engines)


def live_version(engines: Iterable[Engine], trainer: Version) -> Version:
    """The oldest version that an engine with work serves; the trainer's own where none is up."""
    return min((e.version for e in engines if e.admitted), default=trainer)
