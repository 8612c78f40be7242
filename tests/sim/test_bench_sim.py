"""Every arm of `bench sim` in a small configuration: deterministic, complete, and the ladder's steps in their order."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.bench.sim import main
from agentrl.recipe.load import load_sim
from agentrl.recipe.sim import SimRecipe

RECIPES = Path(__file__).parents[2] / "recipes" / "sim"
SMALL = ("steps=3", "fleet.hosts=2", "policy.groups=2", "policy.siblings=6", "policy.window_groups=4")


def small(*more: str, name: str = "terminal-bench-b300") -> SimRecipe:
    return load_sim(RECIPES / f"{name}.toml", overrides=[*SMALL, *more])


def same(arm: str, recipe: SimRecipe) -> None:
    first, second = (msgspec.json.encode(msgspec.structs.replace(main.run(recipe, arm, 1), wall_s=0)) for _ in range(2))
    assert first == second


def test_the_ladder_is_deterministic() -> None:
    same("ladder", small("steps=2"))
