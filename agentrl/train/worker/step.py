"""One optimizer step on one batch: rows forward and backward, clip, AdamW, and what it measured.

The loss is normalised by the batch's trainable tokens, counted before the first row, so how the batch is packed changes
nothing but rounding. Trajectories with zero advantage have zero gradient: they run forward only, for the metrics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import DataError, InfraError
from agentrl.recipe.schema import Train
from agentrl.records import Batch, Trajectory, Version
from agentrl.train.batching.advantage import advantages
from agentrl.train.batching.pack import Row, efficiency, pack
from agentrl.train.worker.loss import dis_loss, keep, ratios, token_logprobs
from agentrl.train.worker.model import Policy


class Abandoned(InfraError):
    """The step was told to stop between two rows. The weights are as they were."""


class Learner:
    """A policy and its optimizer at one version. Not thread-safe: one thread owns it."""

    def __init__(self, policy: Policy, train: Train, *, temperature: float, version: Version) -> None:
        self.policy = policy
        self.version = version
        self.optimizer = make_optimizer(policy, train)
        self._train = train
        self._temperature = temperature

    def step(self, batch: Batch, stop: threading.Event) -> dict[str, float]:
        """Version v to v + 1. Returns metrics (see `_Tally.figures`). Abandoned where `stop` was set in time.

        DataError where the batch contradicts itself or its loss is not finite; the weights are then untouched.
        """
        began = time.perf_counter()
        learn, observe = self._rows(batch)
        total = sum(len(row.target) for row in [*learn, *observe])
        tally = _Tally(self.version, self._train)
        self.optimizer.zero_grad(set_to_none=False)
        for row, last in _flagged(learn, observe):
            if stop.is_set():
                raise Abandoned(f"batch {batch.id}: abandoned between two rows")
            with torch.set_grad_enabled(not last):
                logp, ratio, entropy = self._score(row)
                loss = self._loss(row, logp, ratio, total)
            if not last:
                loss.backward()
            tally.add(row, logp.detach(), ratio, entropy, loss.detach())
        norm = self._update(batch)
        figures = tally.figures()
        seconds = time.perf_counter() - began
        tokens = sum(len(row.tokens) for row in [*learn, *observe])
        return figures | {
            "grad_norm": norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "reward_mean": float(np.mean([t.verdict.reward for t in batch.trajectories])),
            "informative": sum(len(r.documents) for r in learn) / max(1, len(batch.trajectories)),
            "tokens": float(tokens),
            "tokens_per_s": tokens / seconds,
            "packing_efficiency": efficiency([*learn, *observe]),
            "rows": float(len(learn) + len(observe)),
            "step_s": seconds,
        }

    def forget(self) -> None:
        """Moments of zero, as at the very beginning."""
        self.optimizer = make_optimizer(self.policy, self._train)

    def _rows(self, batch: Batch) -> tuple[list[Row], list[Row]]:
        """Rows to learn from, and rows of zero advantage that are only measured."""
        if batch.version != self.version:
            raise DataError(f"batch {batch.id} is for version {batch.version}, the trainer holds {self.version}")
        try:
            advantage = advantages(batch.trajectories, self._train.advantage)
            parts = []
            for mask in (advantage != 0.0, advantage == 0.0):
                index = np.flatnonzero(mask)
                chosen: list[Trajectory] = [batch.trajectories[i] for i in index]
                parts.append(pack(chosen, advantage[index].tolist(), self._train.micro_tokens))
        except ValueError as exc:
            raise DataError(f"batch {batch.id}: {exc}", hint="The journal or the sender damaged it.") from exc
        vocabulary = self.policy.vocabulary
        for row in [*parts[0], *parts[1]]:
            if row.tokens.min() < 0 or row.tokens.max() >= vocabulary:
                raise DataError(f"batch {batch.id}: a token id is outside the model's vocabulary of {vocabulary}")
        return parts[0], parts[1]

    def _score(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.policy.logits(row)
        target = torch.from_numpy(row.target).to(logits.device)
        logp, entropy = token_logprobs(logits, target, self._temperature)
        return logp, ratios(logp, torch.from_numpy(row.rollout).to(logits.device)), entropy

    def _loss(self, row: Row, logp: Tensor, ratio: Tensor, total: int) -> Tensor:
        advantage = torch.from_numpy(row.advantage).to(logp.device)
        low, high = self._train.ratio_low, self._train.ratio_high
        return dis_loss(logp, ratio, advantage, low=low, high=high, total=max(1, total))

    def _update(self, batch: Batch) -> float:
        parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        for p in parameters:
            if p.grad is None:  # an expert that no token reached still decays and keeps its momentum
                p.grad = torch.zeros_like(p)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._train.clip_norm))
        if not np.isfinite(norm):
            raise DataError(f"batch {batch.id}: gradient norm is {norm}; the weights were left alone")
        step = int(self.version) + 1
        lr = self._train.lr * min(1.0, step / max(1, self._train.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.version = Version(step)
        return norm


def make_optimizer(policy: Policy, train: Train) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and biases do not."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=train.lr, betas=train.betas, fused=True)


def _flagged(learn: list[Row], observe: list[Row]) -> Iterator[tuple[Row, bool]]:
    """(row, whether it is only observed)."""
    yield from ((row, False) for row in learn)
    yield from ((row, True) for row in observe)


class _Tally:
    """Sums over the batch's trainable tokens, kept as tensors until the end."""

    def __init__(self, version: Version, train: Train) -> None:
        self._version = version
        self._low, self._high = train.ratio_low, train.ratio_high
        self._loss = 0.0
        self._parts: list[Tensor] = []  # each [5, N]: ratio, entropy, gap, comparable, kept

    def add(self, row: Row, logp: Tensor, ratio: Tensor, entropy: Tensor, loss: Tensor) -> None:
        self._loss += float(loss)
        gap = (logp.cpu() - torch.from_numpy(row.rollout)).abs()
        same = torch.from_numpy((row.version == self._version) & row.pure)
        kept = keep(ratio, self._low, self._high).cpu()
        self._parts.append(torch.stack([ratio.cpu(), entropy.cpu(), gap, same.float(), kept.float()]).double())

    def figures(self) -> dict[str, float]:
        """loss; entropy (nats a token); mask_share (tokens outside the band); ratio_mean, _min, _max; logprob gap
        |trainer - engine|, on tokens that were sampled with the trainer's own version over a KV cache of that version
        (absent where there are none) and on all; trainable tokens of each."""
        ratio, entropy, gap, same, kept = torch.cat(self._parts, dim=1) if self._parts else torch.zeros(5, 0).double()
        own = gap[same > 0]
        return {
            "loss": self._loss,
            "entropy": _mean(entropy),
            "mask_share": 1.0 - _mean(kept) if len(kept) else 0.0,
            "ratio_mean": _mean(ratio),
            "ratio_min": float(ratio.min()) if len(ratio) else 0.0,
            "ratio_max": float(ratio.max()) if len(ratio) else 0.0,
            "logprob_gap_all_mean": _mean(gap),
            "logprob_gap_all_max": float(gap.max()) if len(gap) else 0.0,
            "trainable_tokens": float(len(ratio)),
            "same_version_tokens": float(len(own)),
            **({"logprob_gap_mean": _mean(own), "logprob_gap_max": float(own.max())} if len(own) else {}),
        }


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
