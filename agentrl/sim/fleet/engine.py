"""One serving engine in virtual time: ranks that step together, paused, swapped, drained and killed like a real one.

The clock of all ranks is one count of steps. Between two events a step takes `now + growth * steps` seconds, so time
and steps follow from one another in closed form, and one timer stands for the next event of all ranks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable

from agentrl.errors import EngineLost, UserError
from agentrl.records import RankLoad, Version
from agentrl.sim.fleet.rank import At, Rank, Sequence, SimReply, edge_of
from agentrl.sim.fleet.roofline import Costs

_NEVER = math.inf
_INITIAL = Version(0)


class EngineModel:
    """Made inside a running loop. `slowdown` scales what a step costs on the host's CPUs (1: they are free).
    stirred: told whenever it begins to step, and when it stands still again."""

    def __init__(self, name: str, costs: Costs, *, version: Version = _INITIAL) -> None:
        self.name = name
        self.costs = costs
        self.version = version
        self.ranks = [Rank(i, costs) for i in range(costs.ranks)]
        self.staged: Version | None = None
        self.stirred: Callable[[bool], None] = lambda steps: None
        self._loop = asyncio.get_running_loop()
        self._works = [rank.work for rank in self.ranks]
        self._step = 0.0  # steps made so far
        self._at = self._loop.time()  # when that was
        self._pace = (0.0, 0.0)  # seconds of a step now, and its growth with each step; zeros: standing still
        self._next = _NEVER  # step of the next event
        self._when = _NEVER  # its time
        self._timer: asyncio.TimerHandle | None = None
        self._steps = False  # it does
        self._fresh = False  # a `_settle` is on its way
        self._sampled = 0.0
        self._slowdown = 1.0
        self._pauses = 0
        self._draining = False
        self._idle: list[asyncio.Future[None]] = []
        self._lost = ""

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        conversation: Hashable,
        group: Hashable,
        *,
        rank: int,
        prompt_tokens: int,
        new_tokens: int,
        namespace: int | None = None,
        shared_tokens: int = 0,
    ) -> SimReply:
        """Sample `new_tokens` after a prompt of which the first `shared_tokens` are the group's own opening.

        Cached history is found by (namespace, conversation), the opening by (namespace, group); namespace None: the
        version that serves at admission. Cancelling frees the slot and leaves what was computed to be evicted.
        Raises EngineLost once killed, UserError where prompt and reply can never fit.
        """
        if self._lost:
            raise EngineLost(f"{self.name}: {self._lost}")
        if not (0 <= rank < len(self.ranks) and prompt_tokens > 0 and new_tokens > 0):
            raise ValueError(f"{self.name}: rank {rank}, prompt {prompt_tokens}, new {new_tokens}")
        if prompt_tokens + new_tokens > self.costs.pool_tokens:
            raise UserError(
                f"{self.name}: {prompt_tokens} + {new_tokens} tokens do not fit {self.costs.pool_tokens:.0f} of KV",
                hint="shorten the context or choose a topology with more memory per rank",
            )
        now = self._loop.time()
        sequence = Sequence(
            conversation=conversation,
            group=group,
            space=namespace,
            prompt=prompt_tokens,
            shared=min(shared_tokens, prompt_tokens - 1),
            wanted=new_tokens,
            reply=self._loop.create_future(),
            since=now,
        )
        self.ranks[rank].add(sequence)
        self._touch()
        try:
            return await sequence.reply
        except asyncio.CancelledError:
            self._forget(self.ranks[rank], sequence)
            raise

    def _forget(self, rank: Rank, sequence: Sequence) -> None:
        if sequence.at is not At.OVER:
            self._advance()
            rank.leave(sequence, self._step, self._loop.time(), self.version)
            self._touch()

    # --- what an operator sees --------------------------------------------------------------------------------------

    def loads(self) -> list[RankLoad]:
        self._advance()
        return [rank.load() for rank in self.ranks]

    @property
    def generated_tokens(self) -> int:
        """Sampled since the engine started, cancelled ones included."""
        self._advance()
        return round(self._sampled)

    @property
    def step_s(self) -> float:
        """Seconds of a step at this moment; 0 while it stands still."""
        return self._pace[0]

    @property
    def slowdown(self) -> float:
        return self._slowdown

    @slowdown.setter
    def slowdown(self, factor: float) -> None:
        if factor != self._slowdown:
            self._advance()
            self._slowdown = factor
            self._touch()

    # --- what an operator does --------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Freeze in place; each pause wants its own resume."""
        self._advance()
        self._pauses += 1
        self._touch()

    def resume(self) -> None:
        self._advance()
        self._pauses = max(0, self._pauses - 1)
        self._touch()

    async def drain(self) -> None:
        """Admit nobody and return when nothing runs; what waits goes on waiting until `reopen`."""
        self._draining = True
        if any(rank.busy for rank in self.ranks):
            self._idle.append(self._loop.create_future())
            await self._idle[-1]

    def reopen(self) -> None:
        self._draining = False
        for rank in self.ranks:
            rank.stirred = True
        self._touch()

    def abort_all(self) -> int:
        """Every request comes back now, finish "abort", with the tokens it has; how many those are in all."""
        self._advance()
        given_up = 0
        for rank in self.ranks:
            for sequence in rank.everyone():
                rank.leave(sequence, self._step, self._loop.time(), self.version)
                tokens = int(sequence.done + 1e-6)
                given_up += tokens
                if not sequence.reply.done():
                    sequence.reply.set_result(sequence.result(tokens, "abort"))
        self._touch()
        return given_up

    async def stage(self, version: Version) -> float:
        """Bring the weights near while serving; the seconds it took."""
        seconds = self.costs.stage_s()
        await asyncio.sleep(seconds)
        self._alive()
        self.staged = version
        return seconds

    async def swap(self, version: Version) -> float:
        """Freeze in place, load, go on with the same KV; the seconds of the pause. Staging first saves its time."""
        self._alive()
        began = self._loop.time()
        self.pause()
        try:
            await asyncio.sleep(self.costs.swap_s() + (0.0 if self.staged == version else self.costs.stage_s()))
            self._alive()
            for rank in self.ranks:
                rank.mark(self._step, self.version)
            self.version = version
        finally:
            self.resume()
        return self._loop.time() - began

    def kill(self, reason: str = "killed") -> None:
        """Gone with all it held: every request raises EngineLost, now and later."""
        self._advance()
        self._lost = reason
        for rank in self.ranks:
            for sequence in rank.everyone():
                rank.leave(sequence, self._step, self._loop.time(), self.version)
                if not sequence.reply.done():
                    sequence.reply.set_exception(EngineLost(f"{self.name}: {reason}"))
        self._settle()

    def _alive(self) -> None:
        if self._lost:
            raise EngineLost(f"{self.name}: {self._lost}")

    # --- time -------------------------------------------------------------------------------------------------------

    def _touch(self) -> None:
        """Something changed: settle once all that happens at this moment has happened."""
        if not self._fresh:
            self._fresh = True
            self._loop.call_soon(self._settle)

    def _advance(self) -> None:
        """Bring the step count to the present."""
        now = self._loop.time()
        pace, growth = self._pace
        if pace > 0.0 and now > self._at:
            if now >= self._when - 1e-9:
                steps = self._next - self._step
                self._step = self._next
            else:
                passed = now - self._at
                steps = 2.0 * passed / (pace + math.sqrt(pace * pace + 2.0 * growth * passed))
                steps = min(steps, self._next - self._step)
                self._step += steps
            for rank in self.ranks:
                if rank.running:
                    self._sampled += rank.advance(steps)
            self._pace = (pace + growth * steps, growth)
        self._at = now

    def _settle(self) -> None:
        self._fresh = False
        self._advance()
        now = self._loop.time()
        if not self._pauses:
            edge = edge_of(self._step)
            for rank in self.ranks:
                if rank.stirred or rank.next <= edge:
                    rank.settle(self._step, now, self.version, admitting=not self._draining)
        if self._idle and not any(rank.busy for rank in self.ranks):
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()
        self._arm(now)

    def _arm(self, now: float) -> None:
        """One timer for the next event. An armed one that is early is left alone: it settles and arms again."""
        due = _NEVER if self._pauses else min(rank.next for rank in self.ranks)
        if self._steps != (due < _NEVER):
            self._steps = not self._steps
            self.stirred(self._steps)
        if due == _NEVER:
            self._pace, self._next, self._when = (0.0, 0.0), _NEVER, _NEVER
            return
        self._pace = pace, growth = self.costs.step(self._works, self._slowdown)
        self._next = due
        steps = due - self._step
        self._when = now + steps * (pace + 0.5 * growth * steps)
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= self._when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._settle()
