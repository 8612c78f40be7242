"""The unchanged driver in a rude world: 200 seeds, every law after every event, over crashes and resumes."""

from __future__ import annotations

import dataclasses

import msgspec
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


def test_a_run_in_which_everybody_hangs_ends_and_names_them() -> None:
    hung = msgspec.structs.replace(draw_policy(stream(0, "policy")), attempt_timeout_s=1e6, stall_s=100.0)
    outcome = run(RudeRun(0, dataclasses.replace(KIND, hang=1.0), hung).play())
    assert outcome.finish.outcome == "no-progress"
    assert "waiting for g0.m0.t0 (on e" in outcome.finish.detail
    assert outcome.elapsed_s < 250.0
