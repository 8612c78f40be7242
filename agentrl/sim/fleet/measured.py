"""An engine as a live run measured it, in place of a roofline: seconds of a step by how many decode at once."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.recipe.sim import Engine
from agentrl.sim.fleet.roofline import Work

_CHUNK = 512.0  # tokens of one prefill step; their time is measured by the token


class Measured:
    """`roofline.Costs`. A step samples one token for each that runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ranks = engine.ranks
        self.slots = engine.slots
        self.pool_tokens = float(engine.kv_tokens)
        self.accepted = 1.0
        self.chunk = _CHUNK
        self.headroom = 0.0

    def step(self, works: Sequence[Work], slowdown: float) -> tuple[float, float]:
        engine = self._engine
        busiest = max(work.running for work in works)
        chunk = max(work.chunk for work in works)
        return (engine.step_s + busiest * engine.sequence_s + chunk * engine.prefill_token_s) * slowdown, 0.0

    def stage_s(self) -> float:
        return self._engine.stage_s

    def swap_s(self) -> float:
        return self._engine.swap_s
