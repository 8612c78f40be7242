"""Supervised steps on demonstrations, with a trial now and then that says when it is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from rich.progress import Progress
from transformers import Glm4MoeForCausalLM

from agentrl.tasks.chores import KINDS
from tiny import model as policy
from tiny.demos import Demonstration, renamed
from tiny.play import Attempt, Speech, play
from tiny.world import World

TRIAL_SEEDS = 200_000
_POOL = 8  # batches are cut from so many batches' worth, sorted by length: less padding
_ABREAST = 4 * len(KINDS)


class School:
    def __init__(self, speech: Speech, world: World, rng: Random, progress: Progress, *, batch: int) -> None:
        self.speech = speech
        self._world = world
        self._rng = rng
        self._progress = progress
        self._batch = batch

    async def teach(
        self,
        model: Glm4MoeForCausalLM,
        shown: Sequence[tuple[str, Demonstration]],
        *,
        lr: float,
        steps: int,
        until: Callable[[float], bool],
        every: int = 100,
    ) -> None:
        """At most `steps` steps; every so many, a trial at temperature 1, whose mean reward may end it."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
        bar = self._progress.add_task("supervised steps", total=steps)
        for step, batch in zip(range(1, steps + 1), self._batches(shown), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, step / 50) * max(0.1, 1 - step / steps)
            chosen, counts = policy.logprobs(model, [(a.tokens, a.trainable) for a in batch])
            loss = -(chosen * counts).sum() / counts.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            self._progress.update(bar, advance=1, description=f"supervised steps, loss {loss.item():.3f}")
            if step % every == 0:
                attempts = await trial(model, self.speech, self._world, 4, seed=step)
                mean = sum(a.reward for a in attempts) / len(attempts)
                self._progress.console.print(f"step {step}: loss {loss.item():.3f}, mean reward {mean:.3f}")
                if until(mean):
                    return

    def _batches(self, shown: Sequence[tuple[str, Demonstration]]) -> Iterator[list[Attempt]]:
        while True:
            pool = self._rng.choices(shown, k=_POOL * self._batch)
            attempts = [self.speech.script(kind, renamed(one, self._rng)) for kind, one in pool]
            attempts.sort(key=lambda a: len(a.tokens))
            batches = [attempts[i : i + self._batch] for i in range(0, len(attempts), self._batch)]
            self._rng.shuffle(batches)
            yield from batches


async def trial(model: Glm4MoeForCausalLM, speech: Speech, world: World, per_kind: int, seed: int = 0) -> list[Attempt]:
    """`per_kind` attempts at each kind, at problems that no demonstration showed."""
    torch.manual_seed(seed)
    problems = [(kind, TRIAL_SEEDS + 1000 * seed + number) for number in range(per_kind) for kind in KINDS]
    attempts: list[Attempt] = []
    for start in range(0, len(problems), _ABREAST):
        attempts += await play(model, speech, world, problems[start : start + _ABREAST])
    return attempts
