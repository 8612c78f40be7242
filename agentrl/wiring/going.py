"""What a live run is at, for people who wait: who has come up, how full the next batch is, who lacks its weights."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.ports import Progress
from agentrl.recipe.schema import Recipe
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core

_NAMES = 4  # that are listed


class Going:
    """Tells `tell` where something has changed. `heard` after the core has handled the event."""

    def __init__(self, recipe: Recipe, core: Core, tell: Progress, *, trainer: bool) -> None:
        self._core = core
        self._tell = tell
        self._told: dict[str, tuple[str, float | None]] = {}
        self._engines = [f"e{i}" for i in range(len(recipe.engines.attach) or recipe.engines.count)]
        self._hosts = 1 if recipe.sandbox.attach else len(recipe.sandbox_hosts)
        self._trainer = trainer
        self._look()

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command]) -> None:
        if not isinstance(event, news.Progressed | news.EngineLoads | news.SandboxHostLoads):
            self._look()

    def _look(self) -> None:
        core = self._core
        lacking = [name for name in self._engines if name not in core.router.engines]
        up = len(self._engines) - len(lacking)
        self._say("engines", f"waiting for {_some(lacking)}" if lacking else "serving", up / len(self._engines))
        missing = self._hosts - len(core.hosts)
        hosts = f"waiting for {missing}" if missing > 0 else "up"
        self._say("sandbox hosts", hosts, min(1.0, len(core.hosts) / self._hosts))
        if self._trainer:
            does = {"absent": "starting", "ready": "waits for a batch", "stepping": "at its step"}[core.trainer]
            self._say("trainer", does, 0.0 if core.trainer == "absent" else 1.0)
        self._batch()
        self._publication()

    def _batch(self) -> None:
        bank, groups = len(self._core.bank), self._core.policy.groups
        if self._core.table.groups or bank:
            self._say("next batch", f"{bank} of {groups} groups are ready", min(1.0, bank / groups))

    def _publication(self) -> None:
        core = self._core
        engines = core.router.engines
        behind = sorted(name for name, engine in engines.items() if engine.version < core.serving)
        if behind or "publication" in self._told:
            what = f"v{core.serving}: {_some(behind)} to come" if behind else f"v{core.serving} serves everywhere"
            self._say("publication", what, 1.0 - len(behind) / max(1, len(engines)))

    def _say(self, who: str, what: str, share: float) -> None:
        if self._told.get(who) != (what, share):
            self._told[who] = (what, share)
            self._tell(who, what, share)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")
