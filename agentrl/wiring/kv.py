"""How much KV cache one token takes, from the model's `config.json`, and what that leaves room for.

As SGLang 0.5.23 lays it out (`mem_cache/memory_pool.py`): plain attention keeps keys and values of every KV head; MLA
keeps one latent and one rotary part a layer; DSA keeps beside it, in every layer with an indexer of its own, an FP8 key
with one float32 scale for each 128 of it. FP8 halves all but the index.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.recipe.schema import Recipe
from agentrl.records import Record

_SCALE_EVERY, _SCALE_BYTES = 128, 4
_GB = 1e9


class KvFit(Record):
    """token_bytes: on each GPU that holds the token. of: what they consist of. rank_tokens: that one rank holds, 0
    where neither the recipe nor its `engines.gpu_gb` says. wanted: of all its slots at full context."""

    token_bytes: int
    of: str
    rank_tokens: int
    wanted: int

    @property
    def rank_gb(self) -> float:
        return self.rank_tokens * self.token_bytes / _GB

    @property
    def wanted_gb(self) -> float:
        return self.wanted * self.token_bytes / _GB


def kv_fit(recipe: Recipe, folder: Path, model_bytes: int) -> KvFit | None:
    """None where the configuration does not say how its attention is laid out."""
    try:
        config = json.loads((folder / "config.json").read_text())
        size, of = token_bytes(config.get("text_config") or config, _element(recipe), recipe)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    engines = recipe.engines
    tokens = engines.kv_tokens
    if not tokens and engines.gpu_gb:
        share = engines.memory_share or 0.85
        left = engines.gpu_gb * _GB * share - model_bytes / engines.split
        tokens = max(0, int(left / size))
    return KvFit(token_bytes=size, of=of, rank_tokens=tokens, wanted=engines.slots * recipe.model.context_tokens)


def token_bytes(config: dict[str, Any], element: int, recipe: Recipe) -> tuple[int, str]:
    """Bytes of one token on one GPU, and their parts in words. element: bytes of one number of the cache."""
    layers = int(config["num_hidden_layers"]) + (1 if recipe.engines.draft_tokens else 0)
    if config.get("kv_lora_rank"):
        latent, rotary = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        size, of = layers * (latent + rotary) * element, f"{layers} layers of {latent}+{rotary} latent x {element} B"
        if head := int(config.get("index_head_dim") or 0):
            own = _indexers(config, layers)
            each = head + head // _SCALE_EVERY * _SCALE_BYTES
            size, of = size + own * each, f"{of}, {own} indexers of {each} B"
        return size, of
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    held = -(-heads * recipe.engines.ranks // recipe.engines.split)  # of a rank's GPUs each has its share of the heads
    return layers * 2 * held * width * element, f"{layers} layers of 2 x {held} heads of {width} x {element} B"


def _indexers(config: dict[str, Any], layers: int) -> int:
    """Layers that choose tokens by themselves; the others take over what the one before them chose."""
    kinds: list[str] | None = config.get("indexer_types")
    if not kinds:
        return layers
    return kinds.count("full") + max(0, layers - len(kinds))  # the draft layer has its own


def _element(recipe: Recipe) -> int:
    engines = recipe.engines
    if engines.kv_dtype == "auto":
        return 4 if engines.dtype == "float32" else 2
    return 1 if engines.kv_dtype == "fp8_e4m3" else 2
