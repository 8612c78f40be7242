"""What people who wait for a live run are told."""

from __future__ import annotations

from agentrl.recipe.schema import Engines, Recipe
from agentrl.records import Version
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.wiring.going import Going

POLICY = Policy(steps=4, groups=2, siblings=2, window_groups=2, window_attempts=4, bound=2)


class Ear:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, float | None]] = []

    def __call__(self, who: str, what: str, share: float | None = None) -> None:
        self.said.append((who, what, share))

    def last(self, who: str) -> tuple[str, float | None]:
        return next((what, share) for name, what, share in reversed(self.said) if name == who)


def up(engine: str, version: int = 0) -> news.EngineUp:
    return news.EngineUp(engine=engine, epoch=0, version=Version(version), ranks=1, slots=4, kv_tokens=99)


def test_from_the_first_engine_to_published_weights() -> None:
    core, ear, now = Core(POLICY), Ear(), 0.0
    going = Going(Recipe(name="t", engines=Engines(count=2)), core, ear, trainer=True)

    def hear(*events: news.Event) -> None:
        nonlocal now
        for event in events:
            now += 1.0
            going.heard(now, event, core.handle(event, now))

    assert ear.last("engines") == ("waiting for e0, e1", 0.0)
    assert ear.last("trainer") == ("starting", 0.0)
    hear(news.Resumed(steps=4), up("e1"))
    assert ear.last("engines") == ("waiting for e0", 0.5)
    hear(up("e0"), news.SandboxHostUp(host="local", capacity=4), news.TrainerReady(version=Version(0)))
    assert ear.last("engines") == ("serving", 1.0)
    assert ear.last("sandbox hosts") == ("up", 1.0)
    assert ear.last("trainer") == ("waits for a batch", 1.0)
    assert not [who for who, *_ in ear.said if who == "publication"]
    hear(news.WeightsOffered(version=Version(3)))
    assert ear.last("publication") == ("v3: e0, e1 to come", 0.0)
    hear(news.EngineLoaded(engine="e1", epoch=0, version=Version(3)))
    assert ear.last("publication") == ("v3: e0 to come", 0.5)
    hear(news.EngineLoaded(engine="e0", epoch=0, version=Version(3)))
    assert ear.last("publication") == ("v3 serves everywhere", 1.0)
    hear(news.EngineDown(engine="e0", epoch=0, reason="killed"))
    assert ear.last("engines") == ("waiting for e0", 0.5)
    told = len(ear.said)
    hear(news.Tick(), news.Tick())
    assert len(ear.said) == told  # nothing new, nothing said
