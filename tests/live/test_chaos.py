"""kill -9 of everyone once, in one run: nothing acknowledged is lost, nothing is left behind."""

from __future__ import annotations

import pytest

from tests.live.chaos import run_with_kills


@pytest.mark.live
@pytest.mark.timeout(300)
def test_everyone_is_killed_once_and_nothing_is_lost() -> None:
    kinds = ["engine", "sandbox", "trainer", "parent"]
    report = run_with_kills(kinds, seed=1, steps=500, gap_s=(5.0, 9.0), overrides=[], drain=True)
    assert report.kills == dict.fromkeys(kinds, 1)
    assert report.lost == []
    assert report.leaked == []
    assert report.acknowledged > 0
    assert report.summary["outcome"] == "drained", report.summary["detail"]
    assert report.summary["exit_code"] == 130
    assert report.summary["ledger_balanced"]
    assert all(step["age"]["max"] <= 4 for step in report.summary["steps"])
