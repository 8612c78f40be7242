"""News of a weight change that is over, come late or twice, never touches the one that goes on: a second swap beside
the first could leave the engine at the older of two versions."""

from __future__ import annotations

import pytest

from agentrl.records import Version
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim.clock import run
from agentrl.wiring.sim import RudeRun

POLICY = Policy(steps=9, groups=1, siblings=1, window_groups=4, window_attempts=4, bound=8)
LATE: list[type[news.EngineStaged | news.EngineLoaded | news.EngineLoadFailed]] = [
    news.EngineStaged,
    news.EngineLoaded,
    news.EngineLoadFailed,
]


def about(kind: type, version: int) -> news.Event:
    more = {"detail": "it broke"} if kind is news.EngineLoadFailed else {}
    event: news.Event = kind(engine="e0", epoch=0, version=Version(version), **more)
    return event


def at_work(version: int, *, staged: bool) -> Core:
    """An engine that holds the version before and takes this one: it stages it, or swaps to it."""
    core = Core(POLICY)
    core.handle(news.EngineUp(engine="e0", epoch=0, version=Version(0), ranks=1, slots=4, kv_tokens=100), 0.0)
    for each in range(1, version + 1):
        core.handle(news.WeightsOffered(version=Version(each)), float(each))
        if each < version or staged:
            core.handle(about(news.EngineStaged, each), each + 0.1)
        if each < version:
            core.handle(about(news.EngineLoaded, each), each + 0.2)
    return core


@pytest.mark.parametrize("staged", [False, True], ids=["staging", "swapping"])
@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("older", [1, 2])
def test_older_news_changes_nothing(kind: type, older: int, staged: bool) -> None:
    core = at_work(3, staged=staged)
    [engine] = core.engines
    before = (engine.version, engine.staging, engine.staged, engine.swapping, engine.failures)
    given = core.handle(about(kind, older), 9.0)
    assert not [c for c in given if isinstance(c, orders.StageWeights | orders.SwapWeights | orders.RestartEngine)]
    assert before == (engine.version, engine.staging, engine.staged, engine.swapping, engine.failures)


@pytest.mark.parametrize("kind", LATE)
def test_news_of_the_change_itself_is_heard(kind: type) -> None:
    core = at_work(3, staged=kind is not news.EngineStaged)
    core.handle(about(kind, 3), 9.0)
    [engine] = core.engines
    match kind:
        case news.EngineStaged:
            assert (engine.staging, engine.swapping) == (None, 3)
        case news.EngineLoaded:
            assert (engine.version, engine.swapping) == (3, None)
        case _:
            assert (engine.staging, engine.swapping, engine.failures) == (3, None, 1)  # it begins anew


def test_the_world_that_found_it() -> None:
    """Such an engine served older tokens than the cut had counted on, and the cut waited for ever."""
    assert run(RudeRun(713).play()).finish.outcome == "done"
