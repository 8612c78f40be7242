"""No batch holds a token older than K: what attempts said of their tokens, against the orders, from outside."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import msgspec
import pytest

from agentrl.records import AttemptId, Version
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.wiring.sim import draw_policy
from tests.laws.world import World

MODES = list(
    itertools.product(
        ("async", "sync", "pipelined"),
        ("drop", "wait", "mask"),
        ("continue", "finish", "regenerate", "restart"),
        ("rolling", "all"),
    )
)


def audit(world: World) -> int:
    """Tokens looked at. The first report of an attempt counts, as late and double ones must change nothing."""
    told: dict[AttemptId, tuple[tuple[Version, int], ...]] = {}
    seen = 0
    for _, event, commands in world.log:
        if isinstance(event, news.AttemptEnded):
            told.setdefault(event.facts.attempt, event.facts.versions)
        for batch in (command for command in commands if isinstance(command, orders.TrainOn)):
            floor, counts = batch.version - world.policy.bound, Counter[Version]()
            for attempt in batch.attempts:
                for version, tokens in told[attempt]:
                    if version < floor and not batch.mask:
                        raise AssertionError(
                            f"batch {batch.batch} at version {batch.version}, K {world.policy.bound}: "
                            f"{attempt} brings {tokens} tokens of version {version}"
                        )
                    counts[version] += tokens
            proven: Counter[Version] = Counter()
            for version, tokens in (pair for proof in batch.proofs for pair in proof.tokens):
                assert version >= floor, f"batch {batch.batch} proves tokens of version {version}, floor {floor}"
                proven[version] += tokens
            assert proven == {v: n for v, n in counts.items() if v >= floor}, f"batch {batch.batch}: false histogram"
            assert sum(proof.masked for proof in batch.proofs) == sum(n for v, n in counts.items() if v < floor)
            seen += counts.total()
    return seen


@pytest.mark.parametrize("mode", ["async", "sync", "pipelined"])
def test_no_token_older_than_K_in_any_mode(mode: str) -> None:
    seen = 0
    for number, (_, stale, in_flight, order) in enumerate(m for m in MODES if m[0] == mode):
        drawn = draw_policy(random.Random(number))
        rounds = 2 * drawn.groups if mode != "async" else 0
        policy = msgspec.structs.replace(
            drawn,
            mode=mode,
            when_stale=stale,
            in_flight=in_flight,
            order=order,
            round_groups=rounds,
            window_groups=max(drawn.window_groups, rounds),
            bound=max(drawn.bound, 2 if rounds else 0),
        )
        world = World(number, policy=policy)
        world.run()
        seen += audit(world)
    assert seen > 0
