"""The policy: any causal language model that transformers can load, in fp32, on packed rows.

Everything but attention works on a flat [1, T] row, so packing costs nothing there. Attention is registered with
transformers as an implementation of our own that runs each document by itself: exact, no mask, no padding. A model that
mixes tokens in some other way (a recurrence, its own attention code) would leak between documents; `load_policy` proves
that it does not, and where it does the documents run one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from agentrl.errors import UserError
from agentrl.train.batching.pack import Ints, Row

_VARLEN = "agentrl_documents"
_PROBE_TOLERANCE = 1e-3  # of log-probabilities; a leak moves them by far more, fp32 rounding by far less


def _attend_documents(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: tuple[int, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv heads, T, d] -> [1, T, heads, d]. documents: lengths, sum T."""
    lengths = list(documents) if documents is not None else [query.shape[2]]
    grouped = query.shape[1] != key.shape[1]
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(_VARLEN, _attend_documents)
AttentionMaskInterface.register(_VARLEN, lambda *_, **__: None)


class Policy:
    """A loaded model. `packed`: a row is one forward pass; otherwise each of its documents is one."""

    def __init__(self, model: PreTrainedModel, *, packed: bool) -> None:
        self.model = model
        self.packed = packed

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def logits(self, row: Row) -> Tensor:
        """[N, V]: what the model predicts at each `row.predict`."""
        if self.packed:
            return self.forward(row.tokens, row.positions, row.predict, row.lengths)
        parts = []
        for start, end in zip(row.bounds[:-1], row.bounds[1:], strict=True):
            inside = row.predict[(row.predict >= start) & (row.predict < end)] - start
            parts.append(self.forward(row.tokens[start:end], row.positions[start:end], inside, (end - start,)))
        return torch.cat(parts)

    def save(self, folder: str) -> None:
        """Safetensors in the layout that the model's family publishes (and SGLang loads), and nothing beside them.

        The configuration stays the one that the model came with: transformers would write it in its own dialect, which
        another version of it, or an engine, may not read.
        """
        self.model.save_pretrained(folder)
        for file in Path(folder).iterdir():
            if ".safetensors" not in file.name:
                file.unlink()

    def forward(self, tokens: Ints, positions: Ints, predict: Ints, lengths: tuple[int, ...]) -> Tensor:
        """tokens, positions [T], predict [N] -> logits [N, V]. lengths: of the documents, sum T."""
        extra = {"documents": lengths} if self.packed else {}
        out = self.model(
            input_ids=torch.from_numpy(tokens)[None].to(self.device),
            position_ids=torch.from_numpy(positions)[None].to(self.device),
            logits_to_keep=torch.from_numpy(predict).to(self.device),
            use_cache=False,
            **extra,
        )
        return cast(Tensor, out.logits[0])


def load_policy(folder: str, *, device: str = "cpu") -> Policy:
    """UserError where the folder is not a model that transformers can load."""
    hf_logging.disable_progress_bar()
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder}: no config.json, so not a model folder", hint="Give the folder of a saved model.")
    try:
        return _packed(folder, device) or Policy(_from_pretrained(folder, device), packed=False)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as exc:
        raise UserError(f"{folder}: cannot be loaded as a model: {exc}", hint="Check config.json and weights.") from exc


def _packed(folder: str, device: str) -> Policy | None:
    """The model on packed rows, or None where its code has no seam for our attention or mixes documents anyway."""
    try:
        policy = Policy(_from_pretrained(folder, device, attn_implementation=_VARLEN), packed=True)
        return policy if _isolates_documents(policy) else None
    except (ValueError, TypeError) as exc:
        if "attn_implementation" in str(exc) or "documents" in str(exc):
            return None
        raise


def _from_pretrained(folder: str, device: str, **choice: str) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **choice)
    # eval: dropout would make the trainer another policy than the one that was sampled from
    return cast(PreTrainedModel, model.to(device).eval())


@torch.no_grad()
def _isolates_documents(policy: Policy) -> bool:
    """Whether two documents in one row score as each does alone."""
    tokens = np.arange(12) * 7 % policy.vocabulary
    positions = np.concatenate([np.arange(5), np.arange(7)])
    together = policy.forward(tokens, positions, np.arange(12), (5, 7))
    first = policy.forward(tokens[:5], positions[:5], np.arange(5), (5,))
    second = policy.forward(tokens[5:], positions[5:], np.arange(7), (7,))
    gap = torch.log_softmax(together, -1) - torch.log_softmax(torch.cat([first, second]), -1)
    return bool(gap.abs().max() < _PROBE_TOLERANCE)
