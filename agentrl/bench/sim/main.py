"""Which arm is which, one entry for all."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from agentrl.bench.sim import ladder, peers, publication, rounds, serving, speed, windows
from agentrl.bench.sim.sheet import Sheet
from agentrl.recipe.sim import SimRecipe

ARMS: dict[str, Callable[[SimRecipe, int], Sheet]] = {
    "ladder": ladder.run,
    "serving": serving.run,
    "publication": publication.run,
    "peers": peers.run,
    "rounds": rounds.run,
    "window": windows.run,
    "speed": speed.run,
}


def run(recipe: SimRecipe, arm: str, seeds: int) -> Sheet:
    began = time.perf_counter()
    sheet = ARMS[arm](recipe, seeds)
    return msgspec.structs.replace(sheet, wall_s=time.perf_counter() - began)
