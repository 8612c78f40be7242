"""`finish`: several versions are served at once, and the oldest is given up when its last trajectory has ended; one
that is stuck holds it until a stated deadline and is then counted."""

from __future__ import annotations

from agentrl.records import AttemptId, TaskId, TrajectoryFacts, Version
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler import publication
from agentrl.scheduler.core import Core
from agentrl.scheduler.laws import Laws
from agentrl.scheduler.policy import Policy

PATIENCE_S = 50.0
POLICY = Policy(
    steps=9,
    groups=1,
    siblings=1,
    window_groups=8,
    window_attempts=5,
    bound=8,
    attempt_timeout_s=1e6,
    stall_s=1e6,
    in_flight="finish",
    finish_timeout_s=PATIENCE_S,
)


class Played:
    """Two engines and five conversations under version 0; the first has ended and made version 1, staged everywhere."""

    def __init__(self) -> None:
        self.core, self.laws, self.now = Core(POLICY), Laws(), 0.0
        for name in ("e0", "e1"):
            up = news.EngineUp(engine=name, epoch=1, version=Version(0), ranks=1, slots=4, kv_tokens=4000)
            self.give(up)
        self.give(news.SandboxHostUp(host="h0", capacity=20), news.TrainerReady(version=Version(0)))
        self.give(*(news.TaskOffered(task=TaskId(f"t{i}")) for i in range(5)))
        for attempt in list(self.core.table.running):
            self.give(news.AttemptBegan(attempt=attempt, oldest=Version(0)))
        self.end(min(self.core.table.running))
        self.give(news.StepFinished(batch=0, version=Version(1), seconds=1.0))
        staged = [news.EngineStaged(engine=name, epoch=1, version=Version(1)) for name in ("e0", "e1")]
        self.swaps = self.give(*staged)

    def give(self, *events: news.Event) -> list[str]:
        """Names of engines that are told to swap."""
        swaps = []
        for event in events:
            commands = self.core.handle(event, self.now)
            self.laws.check(self.core, commands)
            swaps += [order.engine for order in commands if isinstance(order, orders.SwapWeights)]
        return swaps

    def end(self, attempt: AttemptId, *versions: int) -> list[str]:
        told = tuple((Version(v), 10) for v in versions or (0,))
        facts = TrajectoryFacts(attempt=attempt, reward=1.0, tokens=20, generated=10, versions=told)
        return self.give(news.AttemptEnded(facts=facts))

    def on(self, engine: str) -> list[AttemptId]:
        return self.core.router.engines[engine].attempts()

    @property
    def draining(self) -> list[str]:
        return [engine.name for engine in self.core.engines if engine.draining is not None]

    @property
    def oldest_served(self) -> int:
        return publication.live_version(self.core.engines, Version(0))

    def loaded(self, engine: str) -> list[str]:
        return self.give(news.EngineLoaded(engine=engine, epoch=1, version=Version(1)))


def test_the_window_of_versions_advances_with_the_last_trajectory_of_the_oldest() -> None:
    played = Played()
    assert played.swaps == []
    for left in (2, 1):  # engines that still serve version 0, each until its last conversation of it has ended
        [name] = played.draining
        *others, last = played.on(name)
        assert all(played.end(attempt) == [] for attempt in others)
        assert played.oldest_served == 0
        assert played.end(last) == [name]
        assert played.loaded(name) == []
        assert played.oldest_served == (0 if left == 2 else 1)
        assert {e.version for e in played.core.engines} == ({0, 1} if left == 2 else {1})
    assert played.core.ledger.fallbacks == played.core.ledger.mixed == 0


def test_a_stuck_trajectory_holds_its_version_until_the_deadline_and_is_counted() -> None:
    played = Played()
    [name] = played.draining
    *others, stuck = played.on(name)
    for attempt in others:
        played.end(attempt)
    began, played.now = played.now, played.core.next_deadline() or 0.0
    assert played.now == began + PATIENCE_S
    assert played.core.ledger.fallbacks == 0
    assert played.give(news.Tick()) == [name]
    assert played.core.ledger.fallbacks == 1
    played.loaded(name)
    assert stuck in played.core.table.running  # it goes on, under the new weights
    played.end(stuck, 0, 1)
    assert (played.core.ledger.mixed, played.core.ledger.unsaid) == (1, 0)
