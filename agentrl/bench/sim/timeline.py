"""One batch as it was made: what engines, lanes and the bank held, sampled whenever an engine told its load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.bench.fleet import Recorder, simulate
from agentrl.recipe.sim import SimRecipe
from agentrl.records import Lane
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.wiring.fleet import Options


class Timeline(Recorder):
    """series: parallel lists over `at_s`. engines: generations that run, by engine. lanes: operations that run, on all
    hosts. bank: complete groups that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.series: dict[str, Any] = {
            "at_s": [],
            "engines": {},
            "lanes": {lane.value: [] for lane in Lane},
            "bank": [],
        }

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        super().heard(now, event, commands, core)
        if self.fleet is None or not isinstance(event, news.EngineLoads | news.AttemptEnded):
            return
        series = self.series
        if series["at_s"] and series["at_s"][-1] == now:
            return
        series["at_s"].append(now)
        series["bank"].append(len(core.bank))
        for name, engine in self.fleet.engines.items():
            series["engines"].setdefault(name, []).append(sum(load.running for load in engine.loads()))
        for lane in Lane:
            series["lanes"][lane.value].append(sum(host.running(lane) for host in self.fleet.hosts.values()))


def watch(recipe: SimRecipe, seed: int, options: Options) -> dict[str, Any]:
    """One run's timeline and its cuts."""
    timeline = Timeline()
    simulate(recipe, seed, options, timeline, watch=timeline.watch)
    cuts = [cut["at_s"] for cut in timeline.cuts]
    return {**timeline.series, "cuts_s": cuts, "groups": recipe.policy.groups}
