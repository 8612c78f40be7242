"""A trainer of your own: batches out of a live run, weights back into it. Any framework does; here it is plain torch.

    agentrl run recipes/local.toml --run-dir runs/mine --set train.embedded=false      # in one terminal, on any host
    python examples/external_trainer.py http://127.0.0.1:PORT TOKEN_FILE WORK          # in another, on any host

The URL is in runs/mine/url, the token in runs/mine/token. From another host: `ssh -N -L 8000:127.0.0.1:PORT HOST`,
a copy of the token, and http://127.0.0.1:8000. What each field of a batch means is in docs/trainers.md.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrl.records import Batch, StepReport, Version
from agentrl.train.batching.advantage import advantages
from agentrl.train.client import LeaseLost, RunClient, RunOver

LEASE_S = 300.0  # longer than a step and the way of its weights; else renew meanwhile


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One optimizer step on all trajectories: REINFORCE against the siblings' mean. Returns the loss."""
    optimizer.zero_grad()
    total, sampled = 0.0, sum(sum(t.trainable) for t in batch.trajectories)
    for trajectory, advantage in zip(batch.trajectories, advantages(batch.trajectories, "group_norm"), strict=True):
        tokens = torch.tensor([trajectory.tokens])
        mask = torch.tensor(trajectory.trainable[1:])  # token i is predicted at position i - 1
        logprobs = model(tokens[:, :-1]).logits[0].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        loss = -float(advantage) * logprobs[mask].sum() / sampled
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


async def train(url: str, token: str, work: Path) -> None:
    async with RunClient(url, token, trainer="example") as run:
        version = await run.version()
        await run.take(version, str(work / f"v{version}"))
        model = AutoModelForCausalLM.from_pretrained(work / f"v{version}", dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        while True:
            claim = await run.claim(version, lease_s=LEASE_S, wait_s=20.0)
            if claim is None:
                continue  # none within wait_s: ask again
            began = time.perf_counter()
            loss = await asyncio.to_thread(step, model, optimizer, claim.batch)
            made = Version(version + 1)
            model.save_pretrained(work / f"v{made}")
            await run.give(claim.lease, made, str(work / f"v{made}"))
            seconds = time.perf_counter() - began
            await run.ack(
                claim.lease, StepReport(batch=claim.batch.id, version=made, seconds=seconds, metrics={"loss": loss})
            )
            version = made
            print(f"version {version}: batch {claim.batch.id}, loss {loss:+.4f}, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(train(sys.argv[1], Path(sys.argv[2]).read_text().strip(), Path(sys.argv[3])))
    except RunOver:
        print("the run is over")
    except LeaseLost as exc:
        sys.exit(f"{exc}: another trainer has the batch; start again from the run's version")
