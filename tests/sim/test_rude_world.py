"""The unchanged driver in a rude world: 200 seeds, every law after every event, over crashes and resumes."""

from __future__ import annotations

import pytest

from agentrl.bench.laws import play, sweep
from agentrl.scheduler import events as news
from agentrl.scheduler.commands import digest
from agentrl.scheduler.core import Core
from agentrl.sim.clock import run
from agentrl.sim.world import KIND, stream
from agentrl.wiring.sim import Outcome, RudeRun, draw_policy


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_law_breaks(first: int) -> None:
    result = sweep(50, first=first, quiet=True)
    assert result["failures"] == []
    assert result["outcomes"].keys() <= {"done", "failed"}
    assert result["crashes"] > 0


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = play(7), play(7)
    assert isinstance(first, Outcome)
    assert isinstance(again, Outcome)
    assert first.journal == again.journal


def test_the_journal_replays_over_crashes() -> None:
    for seed in range(20):
        outcome = play(seed)
        assert isinstance(outcome, Outcome)
        core = Core(draw_policy(stream(seed, "policy")))
        for now, event, expected in outcome.journal:
            assert digest(core.handle(news.decode(event), now)) == expected


def test_a_kind_world_trains_every_step_and_loses_nothing() -> None:
    for seed in range(20):
        outcome = run(RudeRun(seed, KIND).play())
        assert outcome.finish.outcome == "done"
        assert outcome.core.ledger.retried == 0
        assert outcome.core.ledger.late == 0
        assert set(outcome.core.ledger.dropped) <= {"end", "stale"}
