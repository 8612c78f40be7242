"""One data-parallel rank: a queue, one prefill at a time, and all that decodes in one batch. Its clock counts steps.

A step gives every decoding sequence the same number of tokens, so a sequence that starts at step s with n tokens to go
ends at step s + n / accepted, whatever happens meanwhile: one heap of ends, no work per token. How long a step takes is
the engine's business.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from agentrl.records import RankLoad, Version
from agentrl.sim.fleet.pool import Held, Pool
from agentrl.sim.fleet.roofline import Costs, Work

_NEVER = math.inf
_EPS = 1e-9  # steps are never told apart more finely than this, relatively


def edge_of(step: float) -> float:
    """What is due by then is due at `step`."""
    return step + _EPS * max(1.0, step)


class At(Enum):
    WAITING = 1
    PREFILL = 2
    DECODE = 3
    OVER = 4


@dataclass(frozen=True, slots=True)
class SimReply:
    """What one generation came to. spans: (version, tokens) in order; tokens: their sum. finish: stop | abort.

    queue_s, prefill_s, decode_s: times in those states, retractions included, pauses of the engine too.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    spans: tuple[tuple[Version, int], ...]
    queue_s: float
    prefill_s: float
    decode_s: float
    finish: str = "stop"


@dataclass(slots=True, eq=False)
class Sequence:
    conversation: Hashable
    group: Hashable
    space: int | None  # of cached history; None until admission: the version that serves then
    prompt: int
    shared: int
    wanted: int  # tokens to sample
    reply: asyncio.Future[SimReply]
    since: float  # when the present state began
    at: At = At.WAITING
    held: Held | None = None
    done: float = 0.0  # tokens sampled before the present stretch of decoding
    began: float = 0.0  # step at which that stretch began
    ticket: int = 0  # of its entry among the ends; 0: it does not decode
    cached: int = -1  # of the first prefill
    retracted: int = 0
    times: dict[At, float] = field(default_factory=dict)
    cuts: list[tuple[Version, float]] = field(default_factory=list)  # (version, tokens sampled by its end)

    def enter(self, at: At, now: float) -> None:
        self.times[self.at] = self.times.get(self.at, 0.0) + now - self.since
        self.at, self.since = at, now

    def result(self, tokens: int, finish: str) -> SimReply:
        spans: list[tuple[Version, int]] = []
        before = 0
        for version, end in self.cuts:
            upto = min(round(end), tokens)
            if upto > before:
                spans.append((version, upto - before))
                before = upto
        if before < tokens and self.cuts:
            spans.append((self.cuts[-1][0], tokens - before))
        return SimReply(
            prompt_tokens=self.prompt,
            cached_tokens=max(0, self.cached),
            tokens=tokens,
            spans=tuple(spans),
            queue_s=self.times.get(At.WAITING, 0.0),
            prefill_s=self.times.get(At.PREFILL, 0.0),
            decode_s=self.times.get(At.DECODE, 0.0),
            finish=finish,
        )


class Rank:
    """`work` is what it asks of a step; `next` the step of its next event, worked out anew once it is `stirred`."""

    def __init__(self, index: int, costs: Costs) -> None:
        self.index = index
        self.costs = costs
        self.pool = Pool(costs.pool_tokens)
        self.work = Work()
        self.waiting: deque[Sequence] = deque()
        self.queued = 0  # of `waiting`, those not cancelled
        self.prefilling: Sequence | None = None
        self.prefilled = 0.0  # step at which the prefill ends
        self.running: dict[Sequence, None] = {}  # oldest admission first
        self.retractions = 0
        self.next = _NEVER
        self.stirred = False
        self._crowded = False  # somebody gave way and nobody has left since: admitting would only repeat it
        self._ends: list[tuple[float, int, Sequence]] = []
        self._count = 0
        self._quantum = max(1.0, self.pool.total / 512)  # evicted at once when decoding fills the pool

    @property
    def busy(self) -> bool:
        return bool(self.running) or self.prefilling is not None

    def load(self) -> RankLoad:
        running = len(self.running) + (self.prefilling is not None)
        used, total = int(self.pool.held), int(self.pool.total)
        return RankLoad(
            rank=self.index, running=running, waiting=self.queued, kv_used_tokens=used, kv_total_tokens=total
        )

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        self.queued += 1
        self.stirred = True
        (self.waiting.appendleft if first else self.waiting.append)(sequence)

    def advance(self, steps: float) -> float:
        """Decode for `steps`; how many tokens that sampled."""
        tokens = steps * self.costs.accepted * len(self.running)
        self.pool.held += tokens
        self.work.context += tokens
        return tokens

    def settle(self, step: float, now: float, version: Version, *, admitting: bool) -> None:
        """Let all happen that is due at `step`, admit whom there is room for, and find the next event."""
        edge = edge_of(step)
        while self.stirred or self.next <= edge:
            self.stirred = False
            while self._ends and self._ends[0][0] <= edge:
                _, ticket, sequence = heapq.heappop(self._ends)
                if sequence.ticket == ticket:
                    self._finish(sequence, step, now, version)
            if self.prefilling is not None and self.prefilled <= edge:
                self._decode(step, now)
            if self.running and self._full(step) <= edge:
                self._make_room(step, now, version)
            if admitting and self.waiting:
                self._admit(step, now, version)
            self.next = self._due(step)

    def _due(self, step: float) -> float:
        """The step of the next end of a sequence, of the prefill, or of free memory."""
        while self._ends and self._ends[0][2].ticket != self._ends[0][1]:
            heapq.heappop(self._ends)
        due = self._ends[0][0] if self._ends else _NEVER
        if self.prefilling is not None and self.prefilled < due:
            due = self.prefilled
        return min(due, self._full(step)) if self.running else due

    def _full(self, step: float) -> float:
        return step + max(0.0, self.pool.free) / (len(self.running) * self.costs.accepted)

    def _admit(self, step: float, now: float, version: Version) -> None:
        """Start the prefill of the first in line, if nothing is prefilling, a slot is free and its prompt fits."""
        while self.waiting and self.waiting[0].at is not At.WAITING:
            self.waiting.popleft()
        if not self.waiting or self.prefilling is not None or len(self.running) >= self.costs.slots:
            return
        head = self.waiting[0]
        space = version if head.space is None else head.space
        prompt = head.prompt + int(head.done)
        shared = min(head.shared, prompt - 1)
        if self.running:  # alone it always fits
            if self._crowded:
                return
            cached = self.pool.match(space, head.conversation, head.group, prompt, shared)
            spare = self.pool.free + self.pool.idle - cached  # what it finds here is not there to be evicted
            if spare < prompt - cached + self.costs.headroom * (len(self.running) + 1):
                return
        self.waiting.popleft()
        self.queued -= 1
        head.space = space
        head.held = self.pool.take(space, head.conversation, head.group, prompt, shared)
        if head.cached < 0:
            head.cached = head.held.cached
        fresh = prompt - head.held.cached
        self.pool.allocate(head.held, fresh)
        head.enter(At.PREFILL, now)
        self.prefilling, self.prefilled = head, step + fresh / self.costs.chunk
        self.work.chunk = self.costs.chunk
        self.work.chunk_context = head.held.cached + fresh / 2

    def _decode(self, step: float, now: float) -> None:
        sequence = self.prefilling
        assert sequence is not None
        assert sequence.held is not None
        self._end_prefill()
        self.pool.settle(sequence.held)
        sequence.enter(At.DECODE, now)
        sequence.began = step
        self.running[sequence] = None
        self.work.running += 1
        self.work.context += sequence.prompt + sequence.done
        self._count += 1
        sequence.ticket = self._count
        end = step + (sequence.wanted - sequence.done) / self.costs.accepted
        heapq.heappush(self._ends, (end, self._count, sequence))

    def _end_prefill(self) -> None:
        self.prefilling = None
        self.work.chunk = 0.0

    def _finish(self, sequence: Sequence, step: float, now: float, version: Version) -> None:
        """Whole tokens again; the last one was sampled and never computed."""
        assert sequence.held is not None
        short = sequence.wanted - self._sampled(sequence, step)
        sequence.held.own += short - 1.0
        self.pool.held -= 1.0 - short
        self.leave(sequence, step, now, version)
        if not sequence.reply.done():
            sequence.reply.set_result(sequence.result(sequence.wanted, "stop"))

    def mark(self, step: float, version: Version) -> None:
        """What was sampled so far is `version`'s: before a swap."""
        for sequence in self.running:
            sequence.cuts.append((version, self._sampled(sequence, step)))

    def _sampled(self, sequence: Sequence, step: float) -> float:
        return min(float(sequence.wanted), sequence.done + (step - sequence.began) * self.costs.accepted)

    def leave(self, sequence: Sequence, step: float, now: float, version: Version) -> None:
        """Out of whatever state it is in; what it computed rests in memory, the rest is free."""
        self.stirred, self._crowded = True, False
        if sequence.at is At.WAITING:
            self.queued -= 1
        elif sequence.at is At.PREFILL:
            assert sequence.held is not None
            missing = min(sequence.held.own, max(0.0, self.prefilled - step) * self.costs.chunk)
            sequence.held.own -= missing
            self.pool.held -= missing
            self._end_prefill()
        elif sequence.at is At.DECODE:
            self._stop_decoding(sequence, step, version)
        if sequence.held is not None:
            self.pool.release(sequence.held)
            sequence.held = None
        sequence.enter(At.OVER, now)

    def _stop_decoding(self, sequence: Sequence, step: float, version: Version) -> None:
        assert sequence.held is not None
        sampled = self._sampled(sequence, step)
        sequence.held.own += sampled - sequence.done
        sequence.done = sampled
        sequence.ticket = 0
        sequence.cuts.append((version, sampled))
        del self.running[sequence]
        self.work.running -= 1
        self.work.context -= sequence.prompt + sampled
        if not self.running:
            self.work.context = 0.0  # rounding ends here

    def _make_room(self, step: float, now: float, version: Version) -> None:
        """Idle entries go first; then the youngest gives way and computes its history anew later."""
        if self.pool.idle > 1e-6:
            self.pool.evict(self._quantum)
            return
        youngest = self.prefilling or next(reversed(self.running))
        self.leave(youngest, step, now, version)
        youngest.enter(At.WAITING, now)
        youngest.retracted += 1
        self.retractions += 1
        self._crowded = True
        self.add(youngest, first=True)
        self.pool.evict(self._quantum)

    def everyone(self) -> list[Sequence]:
        waiting = [sequence for sequence in self.waiting if sequence.at is At.WAITING]
        prefilling = [self.prefilling] if self.prefilling is not None else []
        return [*self.running, *prefilling, *waiting]
