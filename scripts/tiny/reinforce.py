"""A rehearsal of the run the policy is made for: group-relative policy gradients, a few versions behind.

It exists to tune the warm start. The objective is the toolkit's own; the loop is the simplest that can show whether
the reward rises.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random

import torch
from transformers import Glm4MoeForCausalLM

from agentrl.tasks.chores import KINDS
from agentrl.train.worker.loss import dis_loss, ratios
from tiny import model as policy
from tiny.play import Attempt, Speech, play
from tiny.world import World

GROUPS, SIBLINGS = 4, 8


async def rehearse(
    model: Glm4MoeForCausalLM, speech: Speech, world: World, *, steps: int, lr: float, lag: int, seed: int
) -> list[float]:
    """Mean reward of each step's batch. Batches are played by the policy of `lag` steps ago."""
    torch.manual_seed(seed)
    rng = Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    past = [copy.deepcopy(model) for _ in range(lag + 1)]
    order: list[str] = []
    curve = []
    for step in range(steps):
        while len(order) < GROUPS:
            order += rng.sample(list(KINDS), len(KINDS))
        groups, order = order[:GROUPS], order[GROUPS:]
        problems = [(kind, 1_000 * seed + 64 * step) for kind in groups for _ in range(SIBLINGS)]
        actor = past.pop(0)
        attempts = await play(actor, speech, world, problems)
        curve.append(sum(a.reward for a in attempts) / len(attempts))
        _update(model, actor, optimizer, attempts)
        past.append(copy.deepcopy(model))
    return curve


def _update(
    model: Glm4MoeForCausalLM, actor: Glm4MoeForCausalLM, optimizer: torch.optim.Optimizer, attempts: Sequence[Attempt]
) -> None:
    rows = [(a.tokens, a.trainable) for a in attempts]
    with torch.no_grad():
        behaviour, _ = policy.logprobs(actor, rows)
    chosen, counts = policy.logprobs(model, rows)
    weights = _advantages(attempts)[:, None].expand_as(chosen)[counts]
    now, then = chosen[counts], behaviour[counts]
    loss = dis_loss(now, ratios(now, then), weights, low=0.8, high=3.0, total=int(counts.sum()))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _advantages(attempts: Sequence[Attempt]) -> torch.Tensor:
    rewards = torch.tensor([a.reward for a in attempts]).view(-1, SIBLINGS)
    centred = rewards - rewards.mean(1, keepdim=True)
    spread = rewards.std(1, unbiased=False, keepdim=True)
    return torch.where(spread > 1e-6, centred / spread.clamp_min(1e-6), torch.zeros_like(centred)).flatten()
