"""Where a conversation goes: one price in seconds per (engine, rank), nothing else.

    price = wait for a decode slot + prefill of what is not cached there + slowdown of decoding beside the others
            + prefill again of what a full KV cache would evict + the pause of a swap that is going on

Stickiness and group affinity are not rules: a rank that holds the history or a sibling's prompt is simply cheaper,
until load makes it dearer. Ties end in the place's name. Unit costs are measured from finished attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.records import AttemptId, GroupId, Place, RankLoad, TrajectoryFacts, Version

_PREFILL_SHARE = 1 / 20  # prefill of a token against decode of one: compute-bound against bandwidth-bound
_FULL_BATCH_SLOWDOWN = 0.5  # a step with all slots busy takes this much longer than a lone one
_MEMORY = 1 / 32  # weight of the newest finished attempt in the running means


@dataclass(slots=True)
class Costs:
    """Running means of finished attempts; the initial values only break the ice."""

    decode_s: float = 0.02  # per sampled token
    tokens: float = 512.0  # of a whole transcript
    opening: float = 128.0  # prompt tokens of the first turn
    turns: float = 4.0
    generated: float = 128.0
    duty: float = 0.5  # share of a conversation's life that it spends in the engine
    pause_s: float = 1.0

    def learn(self, facts: TrajectoryFacts) -> None:
        if facts.turns == 0 or facts.generated == 0:
            return
        life = facts.engine_s + facts.tool_s
        seen = {
            "decode_s": facts.engine_s / facts.generated,
            "tokens": float(facts.tokens),
            "opening": facts.prompt_tokens / facts.turns / 2,
            "turns": float(facts.turns),
            "generated": float(facts.generated),
            "duty": facts.engine_s / life if life > 0 else self.duty,
        }
        for name, value in seen.items():
            setattr(self, name, (1 - _MEMORY) * getattr(self, name) + _MEMORY * value)


@dataclass(slots=True)
class Rank:
    """One data-parallel rank with its own KV cache."""

    place: Place
    slots: int
    kv_tokens: int
    attempts: dict[AttemptId, None] = field(default_factory=dict)  # conversations placed here, in order
    groups: dict[GroupId, int] = field(default_factory=dict)  # live conversations of each group
    load: RankLoad | None = None

    def add(self, attempt: AttemptId) -> None:
        self.attempts[attempt] = None
        self.groups[attempt.group] = self.groups.get(attempt.group, 0) + 1

    def remove(self, attempt: AttemptId) -> None:
        del self.attempts[attempt]
        self.groups[attempt.group] -= 1
        if not self.groups[attempt.group]:
            del self.groups[attempt.group]

    def price(self, costs: Costs, *, uncached: float, joining: int, swapping: bool) -> float:
        """Seconds that a conversation would lose here. joining: 1 for a newcomer, 0 for one that is here already."""
        here = len(self.attempts) + joining
        busy = costs.duty * here
        if self.load is not None:
            busy = max(busy, float(self.load.waiting + min(self.load.running, self.slots)))
        generation_s = costs.generated * costs.decode_s
        queue = max(0.0, busy - self.slots) / self.slots * generation_s
        slowdown = min(busy / self.slots, 1.0) * _FULL_BATCH_SLOWDOWN * generation_s
        prefill_s = costs.decode_s * _PREFILL_SHARE
        evicted = max(0.0, here * costs.tokens - self.kv_tokens) / max(1.0, here * costs.tokens)
        again = evicted * costs.tokens * costs.turns * prefill_s
        return queue + slowdown + uncached * prefill_s + again + (costs.pause_s if swapping else 0.0)


@dataclass(slots=True)
class Engine:
    """What the core believes of one engine. admitted: it may be given work (it once proved the current version)."""

    name: str
    epoch: int
    version: Version
    ranks: list[Rank]
    admitted: bool
    staged: Version | None = None
    staging: Version | None = None
    swapping: Version | None = None
    draining: float | None = None  # no new conversations until it has swapped: when empty, or at this moment
    failures: int = 0  # weight loads that failed in a row

    @property
    def takes_work(self) -> bool:
        return self.admitted and self.draining is None

    def attempts(self) -> list[AttemptId]:
        return [attempt for rank in self.ranks for attempt in rank.attempts]

    @property
    def open_work(self) -> int:
        return sum(len(rank.attempts) for rank in self.ranks)


@dataclass(slots=True)
class Router:
    engines: dict[str, Engine] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    places: dict[AttemptId, Place] = field(default_factory=dict)

    def place(
        self, attempt: AttemptId, *, history: float | None = None, version: Version | None = None
    ) -> Place | None:
        """The cheapest rank for a conversation that is nowhere yet (or has lost its place); None if no engine serves.

        history: tokens that would have to be prefilled where no sibling's prompt is cached; default the opening.
        version: only where this one is served.
        """
        best = self._cheapest(attempt.group, self.costs.opening if history is None else history, version=version)
        return best[1] if best is not None else None

    def _cheapest(
        self, group: GroupId, history: float, *, avoid: Place | None = None, version: Version | None = None
    ) -> tuple[float, Place] | None:
        best: tuple[float, Place] | None = None
        for engine in self.engines.values():
            if not engine.takes_work or (version is not None and engine.version != version):
                continue
            for rank in engine.ranks:
                if rank.place == avoid:
                    continue
                cached = min(history, self.costs.opening) if group in rank.groups else 0.0
                price = rank.price(
                    self.costs, uncached=history - cached, joining=1, swapping=engine.swapping is not None
                )
                if best is None or (price, rank.place) < best:
                    best = (price, rank.place)
        return best

    def add(self, attempt: AttemptId, place: Place) -> None:
        self.places[attempt] = place
        self._rank(place).add(attempt)

    def remove(self, attempt: AttemptId) -> None:
        place = self.places.pop(attempt, None)
        if place is not None and place.engine in self.engines:
            self._rank(place).remove(attempt)

    def move(self, attempt: AttemptId, place: Place) -> None:
        self.remove(attempt)
        self.add(attempt, place)

    def better(self, engine: Engine, margin: float) -> tuple[AttemptId, Place] | None:
        """One conversation of `engine` that would gain by moving, its whole history prefilled anew included.

        The margin (a share of the price it pays now) keeps it from flapping. The youngest moves: it has least history.
        """
        least: float | None = None
        for rank in engine.ranks:
            if not rank.attempts:
                continue
            now = rank.price(self.costs, uncached=0.0, joining=0, swapping=engine.swapping is not None)
            least = self._least() if least is None else least
            if now * (1 - margin) <= least:
                continue  # not even the best case elsewhere is a gain
            attempt = next(reversed(rank.attempts))
            best = self._cheapest(attempt.group, self.costs.tokens, avoid=rank.place)
            if best is not None and best[0] < now * (1 - margin):
                return attempt, best[1]
        return None

    def _least(self) -> float:
        """No price that a moving conversation could pay is below this."""
        uncached = max(0.0, self.costs.tokens - self.costs.opening)
        prices = (
            rank.price(self.costs, uncached=uncached, joining=1, swapping=engine.swapping is not None)
            for engine in self.engines.values()
            if engine.takes_work
            for rank in engine.ranks
        )
        return min(prices, default=float("inf"))

    def _rank(self, place: Place) -> Rank:
        return self.engines[place.engine].ranks[place.rank]
