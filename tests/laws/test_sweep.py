"""Seeded sweeps of the core in a rude world, every law after every event."""

from __future__ import annotations

import random

import msgspec
import pytest

from agentrl.scheduler import events as news
from agentrl.scheduler.commands import encode
from agentrl.scheduler.core import Core
from agentrl.wiring.sim import draw_policy
from tests.laws.world import World


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_no_law_breaks_and_every_run_ends(start: int) -> None:
    for seed in range(start, start + 20):
        try:
            core = World(seed).run()
        except AssertionError as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken
        assert core.finished is not None
        assert core.finished.outcome in {"done", "failed"}, f"seed {seed}: {core.finished}"


def test_a_kind_world_finishes_every_step_and_drops_only_at_the_end() -> None:
    for seed in range(20):
        policy = msgspec.structs.replace(draw_policy(random.Random(seed)), attempt_timeout_s=1e6)
        core = World(seed, trouble=0.0, policy=policy).run()
        assert core.finished is not None
        assert core.finished.outcome == "done", f"seed {seed}: {core.finished}"
        assert core.steps == core.policy.steps
        assert core.ledger.retried == 0
        assert set(core.ledger.dropped) <= {"end", "stale"}


def test_replaying_the_journal_gives_the_same_commands() -> None:
    for seed in range(20):
        world = World(seed)
        world.run()
        fresh = Core(world.policy)
        for now, event, commands in world.log:
            again = fresh.handle(news.decode(news.encode(event)), now)
            assert encode(again) == encode(commands), f"seed {seed} at {now}: {event}"
