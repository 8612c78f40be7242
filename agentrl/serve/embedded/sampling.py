"""Choosing the next tokens of a batch, with the log-probabilities that SGLang reports: log softmax of logits over
temperature, before top-p (plain logits where the request is greedy)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.serve.embedded.request import Request


class Sampler:
    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """logits (requests, vocabulary), float32 -> token ids and their log-probabilities, one per request."""
        temperatures = [request.sampling.temperature for request in requests]
        if any(t not in (0.0, 1.0) for t in temperatures):
            logits = logits / torch.tensor([t or 1.0 for t in temperatures])[:, None]
        logprobs = logits.log_softmax(-1)
        weights = logprobs.exp()
        top_p = [request.sampling.top_p for request in requests]
        if any(p < 1.0 for p in top_p):
            weights = _nucleus(weights, torch.tensor(top_p)[:, None])
        # the exponential race: argmax of p / Exp(1) is distributed as p
        noise = torch.empty_like(weights).exponential_(generator=self._random)
        tokens = (weights / noise).argmax(-1)
        if 0.0 in temperatures:
            greedy = torch.tensor([t == 0.0 for t in temperatures])
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Zero out all but the smallest set of tokens whose probability reaches `top_p`."""
    ordered, order = weights.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return weights.scatter(1, order, ordered.masked_fill(before >= top_p, 0.0))
