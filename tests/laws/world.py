"""A rude little world around the core alone: a heap of future events, one seed, no ports.

News comes late, twice, out of order, and after the thing it speaks of is gone; engines, hosts, the trainer and the
whole process die and come back. Every law is checked after every event.
"""

from __future__ import annotations

import heapq
import random

import msgspec

from agentrl.records import AttemptId, Blame, RankLoad, TaskId, TrajectoryFacts, Version
from agentrl.scheduler import commands as order
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.laws import Laws
from agentrl.scheduler.policy import Policy
from agentrl.wiring.sim import draw_policy


class World:
    """`run` plays until the core finishes; `trouble` scales faults from 0 (kind) to 1 (rude)."""

    def __init__(
        self, seed: int, *, trouble: float = 1.0, policy: Policy | None = None, core: type[Core] = Core
    ) -> None:
        self.rng = random.Random(seed)
        self.policy = policy or draw_policy(self.rng)
        self.core = core(self.policy)
        self.laws = Laws()
        self.trouble = trouble
        self.now = 0.0
        self.heap: list[tuple[float, int, news.Event | str]] = []
        self.count = 0
        self.log: list[tuple[float, news.Event, list[order.Command]]] = []
        self.engines = {f"e{i}": 0 for i in range(self.rng.randint(1, 4))}  # name -> epoch
        self.held = {name: Version(0) for name in self.engines}
        self.tasks = 0
        self.begun: dict[tuple[int, int], Version] = {}  # sibling -> version of the first token that a resume carries
        self.moved: dict[AttemptId, set[Version]] = {}  # what was served where it was moved to
        self.resumed: set[AttemptId] = set()  # with tokens of an earlier try

    def later(self, mean: float, event: news.Event | str) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + self.rng.expovariate(1 / mean), self.count, event))

    def news(self, mean: float, event: news.Event) -> None:
        """Deliver late, perhaps twice."""
        self.later(mean, event)
        if self.rng.random() < 0.1 * self.trouble:
            self.later(4 * mean, event)

    def engine_up(self, name: str) -> None:
        """A start may take longer than a step: the engine is then behind when it comes up."""
        self.engines[name] += 1
        self.held[name] = self.core.serving
        self.news(self.rng.choice([2.0, 20.0]), self._up(name))

    def _up(self, name: str) -> news.EngineUp:
        return news.EngineUp(
            engine=name, epoch=self.engines[name], version=self.held[name], ranks=2, slots=4, kv_tokens=4000
        )

    def begin(self) -> None:
        for name in sorted(self.engines):
            self.engine_up(name)
        for host in ("h0", "h1"):
            self.news(1.0, news.SandboxHostUp(host=host, capacity=self.rng.randint(2, 20)))
        self.later(3.0, news.TrainerReady(version=self.core.version))
        if self.trouble:
            self.later(40.0, "fault")

    def run(self, limit: int = 60_000) -> Core:
        self.begin()
        for _ in range(limit):
            deadline = self.core.next_deadline()
            if self.core.finished is not None:
                return self.core
            if self.heap and (deadline is None or self.heap[0][0] <= deadline):
                self.now, _, event = heapq.heappop(self.heap)
            else:
                assert deadline is not None, "nothing will ever happen again"
                self.now, event = max(self.now, deadline), news.Tick()
            if isinstance(event, str):
                self.fault()
            else:
                self.give(event)
        raise AssertionError(f"not finished after {limit} events at {self.now}: {self.core.blockers(self.now)}")

    def ending(self, event: news.AttemptEnded) -> news.AttemptEnded:
        """With tokens of where it was moved to: an engine that is behind makes them older than its first ones. Under
        `finish` also of what its engine serves by now, as far as the core knows."""
        facts = event.facts
        versions = {version for version, _ in facts.versions} | self.moved.get(facts.attempt, set())
        place = self.core.router.places.get(facts.attempt)
        if self.policy.in_flight == "finish" and place is not None:
            engine = self.core.router.engines[place.engine]
            if engine.epoch == self.engines[engine.name] and engine.version == self.held[engine.name]:
                versions.add(engine.version)
        changed = msgspec.structs.replace(facts, versions=tuple((v, 50) for v in sorted(versions)))
        return news.AttemptEnded(facts=changed)

    def give(self, event: news.Event) -> None:
        if isinstance(event, news.AttemptEnded):
            event = self.ending(event)
        if isinstance(event, news.AttemptBegan) and event.attempt in self.core.table.running:
            self.begun.setdefault(event.attempt[:2], event.oldest)
        commands = self.core.handle(event, self.now)
        self.log.append((self.now, event, commands))
        self.laws.check(self.core, commands)
        for command in commands:
            self.obey(command)

    def obey(self, command: order.Command) -> None:
        match command:
            case order.PullTasks():
                for _ in range(command.count):
                    self.tasks += 1
                    self.news(0.5, news.TaskOffered(task=TaskId(f"t{self.tasks}")))
            case order.StartAttempt():
                self.play(command)
            case order.TrainOn():
                step = news.StepFinished(batch=command.batch, version=Version(command.version + 1), seconds=1.0)
                self.news(8.0, step)
                self.news(9.0, news.TrainerReady(version=step.version))
            case order.StageWeights():
                self.news(1.0, news.EngineStaged(engine=command.engine, epoch=command.epoch, version=command.version))
            case order.SwapWeights():
                self.swap(command)
            case order.RestartEngine():
                self.engine_up(command.engine)
            case order.MoveAttempt():
                served = self.core.router.engines[command.place.engine].version
                self.moved.setdefault(command.attempt, set()).add(served)
            case _:
                pass

    def swap(self, command: order.SwapWeights) -> None:
        if self.rng.random() < 0.1 * self.trouble:
            self.news(
                2.0,
                news.EngineLoadFailed(
                    engine=command.engine, epoch=command.epoch, version=command.version, detail="refused"
                ),
            )
            return
        self.held[command.engine] = command.version
        self.news(
            self.rng.choice([2.0, 15.0]),
            news.EngineLoaded(engine=command.engine, epoch=command.epoch, version=command.version),
        )

    def play(self, start: order.StartAttempt) -> None:
        attempt, draw = start.attempt, self.rng.random()
        if start.resume is None:
            self.begun.pop(attempt[:2], None)
        served = self.held[start.place.engine]
        oldest = self.begun.get(attempt[:2], served)
        if attempt[:2] in self.begun:
            self.resumed.add(attempt)
        self.news(2.0, news.AttemptBegan(attempt=attempt, oldest=oldest))
        if draw < 0.05 * self.trouble:
            return  # hangs: only the deadline helps
        if draw < 0.15 * self.trouble:
            blame = Blame.TASK if self.rng.random() < 0.1 else Blame.INFRA
            self.news(
                6.0,
                news.AttemptFailed(attempt=attempt, blame=blame, detail="lost", resumable=self.rng.random() < 0.5),
            )
            return
        newer = 0 if self.policy.in_flight == "finish" else self.rng.randint(0, 1)
        versions = sorted({oldest, served, Version(min(self.core.version, served + newer))})
        facts = TrajectoryFacts(
            attempt=attempt,
            reward=self.rng.random(),
            tokens=self.rng.randint(100, 500),
            generated=100,
            versions=tuple((v, 50) for v in versions),
            turns=3,
            prompt_tokens=400,
            engine_s=3.0,
            tool_s=3.0,
        )
        self.news(self.rng.choice([4.0, 10.0, 30.0]), news.AttemptEnded(facts=facts))

    def fault(self) -> None:
        self.later(60.0 / self.trouble, "fault")
        kind = self.rng.choice(["engine", "engine", "host", "trainer", "process", "loads", "pause"])
        name = self.rng.choice(sorted(self.engines))
        match kind:
            case "engine":
                down = news.EngineDown(engine=name, epoch=self.engines[name], reason="killed")
                self.news(1.0, down)
                self.engine_up(name)
            case "host":
                host = self.rng.choice(["h0", "h1"])
                self.give(news.SandboxHostDown(host=host, reason="gone"))
                self.later(5.0, news.SandboxHostUp(host=host, capacity=9))
            case "trainer":
                self.give(news.TrainerDown(reason="killed"))
                self.later(5.0, news.TrainerReady(version=self.core.version))
            case "process":
                self.give(news.Resumed(steps=self.policy.steps))
                for engine in sorted(self.engines):
                    self.engine_up(engine)
                for host in ("h0", "h1"):
                    self.later(1.0, news.SandboxHostUp(host=host, capacity=9))
                self.later(5.0, news.TrainerReady(version=self.core.version))
            case "loads":
                loads = tuple(self.load(rank) for rank in range(2))
                self.give(news.EngineLoads(engine=name, epoch=self.engines[name], loads=loads))
            case _:
                self.give(news.PauseAsked(on=True))
                self.later(5.0, news.PauseAsked(on=False))

    def load(self, rank: int) -> RankLoad:
        running, waiting = self.rng.randint(0, 8), self.rng.randint(0, 9)
        return RankLoad(rank=rank, running=running, waiting=waiting, kv_used_tokens=0, kv_total_tokens=1)
