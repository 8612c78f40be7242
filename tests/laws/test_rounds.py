"""`pipelined` is `sync` whose groups go to the trainer as they complete: the same samples, as many steps."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from agentrl.records import AttemptId, Version
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.wiring.sim import draw_policy
from tests.laws.world import World


def played(seed: int, mode: str) -> tuple[World, list[orders.TrainOn]]:
    drawn = draw_policy(random.Random(seed))
    policy = msgspec.structs.replace(
        drawn,
        mode=mode,
        steps=6,
        round_groups=3 * drawn.groups,
        window_groups=3 * drawn.groups,
        bound=3,
        spare=0,
        when_stale="drop",
        in_flight="continue",
        attempt_timeout_s=1e6,
    )
    world = World(seed, trouble=0.0, policy=policy)
    world.run()
    return world, [c for _, _, commands in world.log for c in commands if isinstance(c, orders.TrainOn)]


def samples(batches: list[orders.TrainOn]) -> Counter[AttemptId]:
    return Counter(attempt for batch in batches for attempt in batch.attempts)


def oldest(world: World, batches: list[orders.TrainOn]) -> set[Version]:
    told = {e.facts.attempt: e.facts.oldest for _, e, _ in world.log if isinstance(e, news.AttemptEnded)}
    return {told[attempt] for attempt in samples(batches)}


@pytest.mark.parametrize("seed", range(20))
def test_the_same_samples_and_as_many_steps(seed: int) -> None:
    sync_world, sync = played(seed, "sync")
    pipelined_world, pipelined = played(seed, "pipelined")
    assert len(sync) == len(pipelined) == 6
    for begin in (0, 3):  # a round is three steps
        rounds = sync[begin : begin + 3], pipelined[begin : begin + 3]
        assert samples(rounds[0]) == samples(rounds[1])
        assert oldest(sync_world, rounds[0]) == oldest(pipelined_world, rounds[1]) == {Version(begin)}
