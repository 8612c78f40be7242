"""Direct double-sided importance sampling, per token, against the engine's own logprobs.

    r_t  = exp(log π_θ(a_t|s_t) − log π_rollout(a_t|s_t))
    f(r) = r   where 1 − low < r < 1 + high,   else 0
    L    = −(1/N) Σ_t f(r_t) Â_t log π_θ(a_t|s_t)          f(r_t) is a constant for the gradient

∇r = r ∇log π, so in the band this has the gradient of the plain importance-weighted objective r·Â; differentiating
f as well would count it twice. Outside, a token gives nothing, whatever the sign of its advantage.
(SAO, arXiv 2607.07508; GLM-5, arXiv 2602.15763. Why: docs/decisions/0014-trainer-objective.md)
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [N, V], target [N] -> logprob of the target [N], entropy of the distribution [N] (no gradient).

    The distribution is the one that was sampled from: softmax(logits / temperature).
    """
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, target[:, None]).squeeze(-1), entropy


def ratios(logp: Tensor, rollout: Tensor) -> Tensor:
    """[N] importance ratios, no gradient."""
    return torch.exp(logp.detach() - rollout)


def keep(ratio: Tensor, low: float, high: float) -> Tensor:
    """[N] bool: inside the open band. NaN is outside."""
    return (ratio > 1.0 - low) & (ratio < 1.0 + high)


def dis_loss(logp: Tensor, ratio: Tensor, advantage: Tensor, *, low: float, high: float, total: int) -> Tensor:
    """Scalar: this row's share of the batch's loss. total: trainable tokens of the whole batch."""
    weight = torch.where(keep(ratio, low, high), ratio, torch.zeros_like(ratio))
    return -(weight * advantage * logp).sum() / total
