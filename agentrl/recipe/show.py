"""A recipe as text: the resolved TOML that a run keeps, with every default filled in."""

from __future__ import annotations

from typing import Any

import msgspec
import tomli_w

from agentrl.recipe.schema import Section


def dump(recipe: Section) -> str:
    """TOML that `load` (of a live recipe) or `load_sim` turns back into the same recipe."""
    return tomli_w.dumps(_stated(msgspec.to_builtins(recipe)))


def _stated(section: dict[str, Any]) -> dict[str, Any]:
    """Without what is absent: TOML has no null."""
    found = {key: _stated(value) if isinstance(value, dict) else value for key, value in section.items()}
    return {key: value for key, value in found.items() if value is not None}
