"""One turn's reply, whatever the engines do meanwhile: nothing sampled and returned is ever sampled again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from agentrl.errors import DeadlineError, EngineLost
from agentrl.records import Place, Reply
from agentrl.rollout.order import Order, Ports
from agentrl.rollout.transcript import Sampled, flaw

_LOSSES = 8  # of one turn
_IDLE_ABORTS = 8  # in a row, without a token


@dataclass(kw_only=True)
class Generation:
    """The reply and how it came about. Prompt, cached and reusable tokens are those of the first call that was
    answered; times add up over all calls that were."""

    place: Place
    began_s: float
    sampled: Sampled = field(default_factory=Sampled)
    cut: bool = False  # ended at the token limit
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reusable_tokens: int = 0
    regenerated: int = 0
    engine_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def add(self, reply: Reply, place: Place, reusable: int, seconds: float) -> None:
        if self.calls == 0:
            self.prompt_tokens, self.cached_tokens = reply.prompt_tokens, reply.cached_tokens
            self.reusable_tokens = reusable
        self.calls += 1
        self.place = place
        self.sampled.extend(reply.tokens, reply.logprobs, reply.spans)
        self.cut = reply.finish == "length"
        self.engine_s += seconds
        # parts are shares of what we measured: together never more, even where the engine's clock was set meanwhile
        share = min(1.0, seconds / max(reply.queue_s + reply.prefill_s + reply.decode_s, 1e-9))
        self.queue_s += share * reply.queue_s
        self.prefill_s += share * reply.prefill_s
        self.decode_s += share * reply.decode_s


async def generate(
    order: Order, ports: Ports, prompt: Sequence[int], max_new_tokens: int, reusable: Callable[[Place], int]
) -> Generation:
    """Sample until the model stops or `max_new_tokens` are there. `reusable`: prompt tokens that a place has computed.

    An engine that is lost costs its unreturned tokens: the call is made again wherever the placement points next. An
    aborted call's partial tokens are kept and the next call goes on from them; under `order.regenerate` they are lost.
    Raises EngineLost where engines keep failing, DeadlineError where no other is named in time or the engine at the
    unchanged place does not answer.
    """
    generation = Generation(place=ports.placement.place, began_s=ports.clock())
    idle = 0
    while True:
        place = ports.placement.place
        before = len(generation.sampled)
        left = max_new_tokens - before
        known = reusable(place)
        began = ports.clock()
        try:
            reply = await _call(order, ports, place, [*prompt, *generation.sampled.tokens], left)
        except EngineLost:
            generation.regenerated += 1
            if generation.regenerated > _LOSSES:
                raise
            await ports.placement.wait_moved(place, deadline_s=order.move_timeout_s)
            continue
        except DeadlineError:
            generation.regenerated += 1
            if ports.placement.place == place or generation.regenerated > _LOSSES:
                raise
            continue
        if reply.finish == "abort" and order.regenerate:
            generation.regenerated += 1
            if generation.regenerated > _LOSSES:
                raise EngineLost(f"{place}: aborted {order.attempt} {generation.regenerated} times")
            continue
        generation.add(reply, place, known, ports.clock() - began)
        if reply.finish != "abort":
            return generation
        if len(generation.sampled) == max_new_tokens:
            generation.cut = True
            return generation
        idle = 0 if len(generation.sampled) > before else idle + 1
        if idle > _IDLE_ABORTS:
            raise EngineLost(f"{place}: aborted {order.attempt} {idle} times in a row without a token")


async def _call(order: Order, ports: Ports, place: Place, tokens: Sequence[int], max_new_tokens: int) -> Reply:
    engine = ports.engines.get(place.engine)
    if engine is None:
        raise EngineLost(f"{place.engine}: no such engine any more")
    sampling = msgspec.structs.replace(
        order.sampling, max_new_tokens=max_new_tokens, stop_token_ids=ports.template.stop_ids
    )
    reply = await engine.generate(
        ports.new_rid(), tokens, sampling, rank=place.rank, deadline_s=order.request_timeout_s
    )
    if wrong := flaw(reply, max_new_tokens):
        raise EngineLost(f"{place}: nonsense for {order.attempt}: {wrong}", hint="see the engine's log")
    return reply
