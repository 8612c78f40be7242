"""A run's story out of its journal, and the page made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from agentrl.errors import UserError
from agentrl.report import page, plots
from agentrl.report.story import STAGES
from agentrl.wiring.story import read_story
from tests.cli import agentrl
from tests.recordings import RECIPE, recorded
from tests.repo.tree import ROOT
from tests.unit.test_top import played

STALE = """
name = "t"
steps = 12
[batch]
groups = 2
siblings = 3
[window]
groups = 12
attempts = 40
[freshness]
K = 1
"""


def test_the_story_adds_up(tmp_path: Path) -> None:
    outcome = recorded(tmp_path, seed=5)
    story = read_story(tmp_path)
    book = outcome.core.ledger
    assert (story.outcome, len(story.steps)) == ("done", 6)
    assert len(story.lengths.completed) == book.ended
    assert len(story.lengths.trained) == 3 * book.trained
    assert len(story.lengths.trained) + len(story.lengths.dropped) <= len(story.lengths.completed)
    assert story.counts["groups trained"] == book.trained
    assert [s.at_s for s in story.samples] == sorted(s.at_s for s in story.samples)
    assert max(s.bank for s in story.samples) >= story.batch_groups
    assert all(0.0 <= s.reward <= 1.0 and s.generated > 0 for s in story.steps)
    assert 0 < story.idle < 1


@pytest.mark.parametrize(("patience_s", "stuck"), [(1e6, False), (0.1, True)])
def test_what_could_not_finish_under_its_weights_is_reported(tmp_path: Path, patience_s: float, stuck: bool) -> None:
    finish = f'[publish]\nin_flight = "finish"\nfinish_timeout_s = {patience_s}\n'
    book = recorded(tmp_path, recipe=RECIPE + finish).core.ledger
    counts = read_story(tmp_path).counts
    assert counts["fallbacks of finish"] == book.fallbacks >= book.mixed == counts["of several versions"]
    assert (book.fallbacks > 0) == stuck


def test_the_stages_of_a_trajectory_are_its_whole_life(tmp_path: Path) -> None:
    recorded(tmp_path)
    story = read_story(tmp_path)
    assert tuple(story.stages) == STAGES
    assert all(seconds >= 0 for seconds in story.stages.values())
    assert story.stages["other"] == pytest.approx(0, abs=1e-6)  # nothing is retried in this world
    mean_life = sum(story.stages.values())
    assert 0 < mean_life < story.elapsed_s


def test_what_became_of_finished_work_adds_up(tmp_path: Path) -> None:
    outcome = recorded(tmp_path, recipe=STALE)
    story = read_story(tmp_path)
    assert set(story.rates) == {"length", "reward", "turns", "kind"}
    for found in story.rates.values():
        assert sum(rate.trained for rate in found) == 3 * outcome.core.ledger.trained
        assert sum(rate.trained + rate.stale + rate.dropped for rate in found) <= len(story.lengths.completed)
        assert sum(rate.stale for rate in found) > 0
        for rate in found:
            assert rate.completion == pytest.approx(rate.trained / (rate.trained + rate.stale + rate.dropped))
    assert [rate.bucket for rate in story.rates["kind"]] == ["sim"]


def test_the_story_and_the_screen_agree(tmp_path: Path) -> None:
    recorded(tmp_path)
    story, status = read_story(tmp_path), played(tmp_path, until=float("inf"))[-1].status
    assert story.waited_s == pytest.approx(status.waited_s)
    assert story.length_ratio == status.length_ratio
    assert [(s.waited_s, s.ages) for s in story.steps] == [(s.waited_s, s.ages) for s in status.recent]


def test_gaps_come_from_what_the_trainer_measured(tmp_path: Path) -> None:
    recorded(tmp_path)
    lines = [{"step": 1, "logprob_gap": {"mean": 0.25}}, {"step": 2, "logprob_gap": {"mean": None}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    assert read_story(tmp_path).gaps == ((1, 0.25),)


@pytest.mark.parametrize("name", plots.PLOTS)
def test_every_plot_draws_one_run_and_two(name: str, tmp_path: Path) -> None:
    recorded(tmp_path)
    story = msgspec.structs.replace(read_story(tmp_path), gaps=((1, 0.1), (2, 0.2)))
    nothing = msgspec.structs.replace(story, steps=(), samples=(), stages={}, gaps=())
    for stories in ([story], [story, nothing]):
        assert plots.png(name, stories).startswith(b"\x89PNG")


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    recorded(tmp_path)
    story = msgspec.structs.replace(read_story(tmp_path), name="<a & b>")
    text = page.html([story, story], {"x": b"png"})
    assert "&lt;a &amp; b&gt;" in text
    assert "<a & b>" not in text
    assert not re.search(r"https?://", text)
    assert "data:image/png;base64," in text
    assert text.count(page.headline(story)) == 2


def test_the_command_writes_a_page_and_says_the_figures(tmp_path: Path) -> None:
    recorded(tmp_path)
    done = agentrl("report", tmp_path, tmp_path, "--json")
    document = done.document
    assert done.code == 0
    run = document["runs"][0]
    assert [sum(step["tokens"].values()) > 0 for step in run["audit"]] == [True] * 6
    assert all(max(map(int, step["tokens"])) == step["oldest"] <= run["K"] for step in run["audit"])
    assert Path(document["page"]).is_file()
    assert [run["steps"] for run in document["runs"]] == [6, 6]
    assert sum(bucket["trained"] for bucket in run["rates"]["length"]) > 0
    told = (ROOT / "docs" / "watching.md").read_text().partition("## report --json")[2]
    assert [field for field in run if f"`{field}`" not in told] == []
    assert (tmp_path / "report" / "stages.png").is_file()


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.toml"):
        read_story(tmp_path)
