"""A recipe as text: the resolved TOML that a run keeps, with every default filled in."""

from __future__ import annotations

import msgspec
import tomli_w

from agentrl.recipe.schema import Recipe


def dump(recipe: Recipe) -> str:
    """TOML that `load` turns back into the same recipe."""
    return tomli_w.dumps(msgspec.to_builtins(recipe))
