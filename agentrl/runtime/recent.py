"""What only time shows: how long the trainer waited, the last steps, throughput, who went down. Fed every event.

The core needs none of it to decide. A live run's face feeds one, and a replay feeds another from the journal: both
draw the same pictures.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from agentrl.records import GroupId, Place, Record, SandboxHostStatus, TrajectoryFacts
from agentrl.runtime.rates import Rates
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core

_STEPS = 120
_WINDOW_S = 60.0  # of throughput


class StepStatus(Record):
    """One batch that was cut. ages: groups by age. train_s is 0 while its step runs."""

    batch: int
    at_s: float
    interval_s: float  # since the cut before
    waited_s: float  # that the trainer had asked before it was cut
    train_s: float = 0.0
    ages: tuple[tuple[int, int], ...] = ()  # (age in versions, groups), ascending


class DownStatus(Record):
    name: str
    kind: str  # engine | sandbox host
    at_s: float
    reason: str
    link: str = ""  # the machine that cannot be reached, where that is why


class Flow(Record):
    """Tokens: sampled per second; reusable prompt tokens, and those of them that came from a cache."""

    tokens_per_s: float = 0.0
    reusable: int = 0
    cached: int = 0

    @property
    def reuse(self) -> float | None:
        """None where nothing could be reused."""
        return self.cached / self.reusable if self.reusable else None

    def __add__(self, other: Flow) -> Flow:
        return Flow(
            tokens_per_s=self.tokens_per_s + other.tokens_per_s,
            reusable=self.reusable + other.reusable,
            cached=self.cached + other.cached,
        )


class Recent:
    """Single-threaded. `heard` after the core has handled the event. keep: the last steps; None: all."""

    def __init__(self, keep: int | None = _STEPS) -> None:
        self.steps: deque[StepStatus] = deque(maxlen=keep)
        self.down: dict[str, DownStatus] = {}
        self.lanes: dict[str, SandboxHostStatus] = {}  # what each sandbox host that is up last said of itself
        self.machines: dict[str, str] = {}  # on which each engine runs; empty: the run's own
        self.rates = Rates()
        self._trainer, self._since = "absent", 0.0
        self._first_cut: float | None = None
        self._last_cut = 0.0
        self._waited = 0.0
        self._late = 0
        self._over = False
        self._flow: dict[Place, deque[tuple[float, TrajectoryFacts]]] = {}
        self._tokens: dict[GroupId, list[int]] = {}  # transcript lengths of open groups
        self._completed: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        match event:
            case news.AttemptEnded() if core.ledger.late == self._late:
                self._ended(now, event.facts, core)
            case news.StepFinished() if self.steps and self.steps[-1].batch == event.batch:
                last = self.steps[-1]
                self.steps[-1] = StepStatus(
                    batch=last.batch,
                    at_s=last.at_s,
                    interval_s=last.interval_s,
                    waited_s=last.waited_s,
                    train_s=event.seconds,
                    ages=last.ages,
                )
            case news.EngineDown():
                self._fell(event.engine, "engine", now, event.reason, event.link)
            case news.SandboxHostDown():
                self._fell(event.host, "sandbox host", now, event.reason, event.link)
                self.lanes.pop(event.host, None)
            case news.SandboxHostLoads():
                self.lanes[event.host] = event.said
            case news.EngineUp():
                self.down.pop(event.engine, None)
                self.machines[event.engine] = event.host
            case news.SandboxHostUp():
                self.down.pop(event.host, None)
            case news.Resumed():
                self.down.clear()
                self.lanes.clear()
                self._since, self._over = now, False
            case _:
                pass
        self._late = core.ledger.late
        self.rates.heard(event, commands)
        self._follow(now, commands, core)

    def _fell(self, name: str, kind: str, now: float, reason: str, link: str) -> None:
        self.down[name] = DownStatus(name=name, kind=kind, at_s=now, reason=reason, link=link)

    def _ended(self, now: float, facts: TrajectoryFacts, core: Core) -> None:
        group = core.table.groups.get(facts.attempt.group)
        place = group.members[facts.attempt.member].place if group is not None else None
        if place is not None:
            flow = self._flow.setdefault(place, deque())
            flow.append((now, facts))
            while flow[0][0] < now - _WINDOW_S:
                flow.popleft()
        self._tokens.setdefault(facts.attempt.group, []).append(facts.tokens)
        self._completed.update(count=1, tokens=facts.tokens)
        self.rates.ended(facts)

    def _follow(self, now: float, commands: Sequence[orders.Command], core: Core) -> None:
        for order in commands:
            match order:
                case orders.TrainOn():
                    self._cut(now, order)
                case orders.DropGroup():
                    self._tokens.pop(order.group, None)
                case orders.Finish():
                    self._over = True
                case _:
                    pass
        if core.trainer != self._trainer:
            self._trainer, self._since = core.trainer, now

    def _cut(self, now: float, order: orders.TrainOn) -> None:
        if self.steps and self.steps[-1].batch == order.batch:
            return  # the same batch, given again
        waited = now - self._since if self._trainer == "ready" else 0.0
        if self._first_cut is None:
            self._first_cut = now
        else:
            self._waited += waited
        ages = Counter(order.version - proof.oldest for proof in order.proofs)
        self.steps.append(
            StepStatus(
                batch=order.batch,
                at_s=now,
                interval_s=now - self._last_cut,
                waited_s=waited,
                ages=tuple(sorted(ages.items())),
            )
        )
        self._last_cut = now
        for proof in order.proofs:
            lengths = self._tokens.pop(proof.group, [])
            self._trained.update(count=len(lengths), tokens=sum(lengths))

    # --- figures ------------------------------------------------------------------------------------------------------

    def trainer_for(self, now: float) -> float:
        return max(0.0, now - self._since)

    def waited(self, now: float) -> float:
        """Since the first batch was cut, the wait that goes on included."""
        waits = self._trainer == "ready" and self._first_cut is not None and not self._over
        going_on = now - self._since if waits else 0.0
        return self._waited + max(0.0, going_on)

    def watched(self, now: float) -> float:
        return 0.0 if self._first_cut is None else max(0.0, now - self._first_cut)

    @property
    def length_ratio(self) -> float | None:
        """None before anything was trained."""
        if not self._trained["count"] or not self._completed["tokens"]:
            return None
        completed = self._completed["tokens"] / self._completed["count"]
        return self._trained["tokens"] / self._trained["count"] / completed

    def flows(self, now: float) -> dict[Place, Flow]:
        """Of each place: the attempts that ended there in the last minute."""
        span = min(_WINDOW_S, max(now, 1.0))
        found = {}
        for place, flow in self._flow.items():
            seen = [facts for at, facts in flow if at >= now - _WINDOW_S]
            found[place] = Flow(
                tokens_per_s=sum(facts.generated for facts in seen) / span,
                reusable=sum(facts.reusable_tokens for facts in seen),
                cached=sum(min(facts.cached_tokens, facts.reusable_tokens) for facts in seen),
            )
        return found
