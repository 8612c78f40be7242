"""`pipelined` trains to the very weights that `sync` trains to where groups complete in the same order: the core's own
orders, in both modes, through the real optimizer."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from agentrl.recipe.schema import Train
from agentrl.records import Batch, Version
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.train.worker.model import load_policy
from agentrl.train.worker.step import Learner
from agentrl.wiring.sim import draw_policy
from tests.laws.world import World
from tests.toy_policy import make_model, trajectory

STEPS, ROUND_STEPS = 4, 2
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}


class Steady(World):
    """What an attempt takes is its own, whoever else is about: both modes see groups complete in the same order."""

    def later(self, mean: float, event: news.Event | str) -> None:
        took = 1.0
        if isinstance(event, news.AttemptEnded):
            took = 2.0 + random.Random(str(event.facts.attempt)).expovariate(0.1)
        elif isinstance(event, news.StepFinished | news.TrainerReady):
            took = 8.0
        self.count += 1
        self.heap.append((self.now + took, self.count, event))
        self.heap.sort()


def trained(mode: str) -> list[orders.TrainOn]:
    policy = msgspec.structs.replace(
        draw_policy(random.Random(0)),
        mode=mode,
        steps=STEPS,
        groups=2,
        siblings=4,
        spare=0,
        round_groups=2 * ROUND_STEPS,
        window_groups=2 * ROUND_STEPS,
        window_attempts=10,
        bound=ROUND_STEPS,
        when_stale="drop",
        in_flight="continue",
        admission="fifo",
        auto=False,
        attempt_timeout_s=1e6,
    )
    world = Steady(0, trouble=0.0, policy=policy)
    world.run()
    return [order for _, _, commands in world.log for order in commands if isinstance(order, orders.TrainOn)]


def batch_of(order: orders.TrainOn) -> Batch:
    """Payloads by attempt alone: the same attempt said the same in both modes."""
    sampled = [proof.oldest for proof in order.proofs]
    made = []
    for attempt in order.attempts:
        rng = random.Random(str(attempt))
        told = trajectory(rng, reward=float(rng.random() < 0.5), length=rng.randint(20, 40), versions=sampled[:1])
        made.append(msgspec.structs.replace(told, attempt=attempt))
    return Batch(
        id=order.batch, version=order.version, bound=order.bound, proofs=order.proofs, trajectories=tuple(made)
    )


def weights(model: Path, batches: list[Batch]) -> list[torch.Tensor]:
    """Parameters and moments after each round, flat."""
    torch.manual_seed(0)
    learner = Learner(load_policy(str(model)), Train(micro_tokens=64), temperature=1.0, version=Version(0))
    found = []
    for number, batch in enumerate(batches, start=1):
        learner.step(msgspec.structs.replace(batch, version=learner.version), threading.Event())
        if number % ROUND_STEPS == 0:
            state = learner.optimizer.state
            parts = [(p.detach(), state[p]["exp_avg"], state[p]["exp_avg_sq"]) for p in state]
            found.append(torch.cat([part.flatten().clone() for each in parts for part in each]))
    return found


def test_pipelined_trains_to_the_weights_of_sync_bit_for_bit(tmp_path: Path) -> None:
    model = make_model(tmp_path / "policy", **SMALL)
    sync, pipelined = trained("sync"), trained("pipelined")
    assert pipelined == sync  # batches, proofs, versions and the order of everything in them
    expected = weights(model, [batch_of(order) for order in sync])
    found = weights(model, [batch_of(order) for order in pipelined])
    assert len(found) == STEPS // ROUND_STEPS
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_another_order_of_the_same_batches_is_another_result(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    model = make_model(tmp_path / "policy", **SMALL)
    batches = [batch_of(order) for order in trained("sync")][:ROUND_STEPS]
    assert not torch.equal(weights(model, batches)[0], weights(model, batches[::-1])[0])


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_a_round_is_sampled_with_the_weights_it_began_with(mode: str) -> None:
    for order in trained(mode):
        first = order.batch - order.batch % ROUND_STEPS
        assert {version for proof in order.proofs for version, _ in proof.tokens} == {first}
