"""The model, its supervised steps, and sampling with it. GLM-4-MoE layout, small enough for two cores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tiny.tokenizer import STOPS

VOCABULARY = 512
CONTEXT = 2048


def new(seed: int, stops: Sequence[int]) -> Glm4MoeForCausalLM:
    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=CONTEXT,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        eos_token_id=list(stops),
        pad_token_id=stops[0],
        dtype="float32",
    )
    return Glm4MoeForCausalLM(config)


def save_generation(folder: Path) -> None:
    """generation_config.json: what the engines stop at."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id(stop) for stop in STOPS]
    settings = {"eos_token_id": stops, "pad_token_id": stops[0], "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def logprobs(
    model: Glm4MoeForCausalLM, rows: Sequence[tuple[list[int], list[bool]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows: log-probability of each token but the first, and which of them count; [rows, longest - 1]."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    counts = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (ids, mask) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        counts[row, : len(ids)] = torch.tensor(mask)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]
    return chosen, counts[:, 1:]


@torch.no_grad()
def sample(model: Glm4MoeForCausalLM, prompts: list[list[int]], stops: Sequence[int], limit: int) -> list[list[int]]:
    """One sampled continuation each at temperature 1, its stop token included."""
    longest = max(map(len, prompts))
    pad = stops[0]
    tokens = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    attend = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=tokens, attention_mask=attend, do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
        max_new_tokens=limit, eos_token_id=list(stops), pad_token_id=pad,
    )  # fmt: skip
    replies = []
    for row in out[:, longest:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        replies.append(row[:end])
    return replies
