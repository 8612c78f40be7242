"""What the live benches compare and how they count: no process is started here."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from rich.console import Console

from agentrl.bench.figures import draw
from agentrl.bench.live import collect, play, publish, sheet
from agentrl.bench.live.sheet import Aim
from agentrl.cli.bench import _draw_sheet
from agentrl.errors import UserError
from agentrl.recipe.load import load
from agentrl.recipe.schema import Recipe
from agentrl.records import Batch, GroupId, GroupProof, StepReport, Version
from agentrl.runtime.placement import Scatter
from agentrl.wiring import Trial
from agentrl.wiring.trial import Unpublished
from tests.builders import trajectory as a_trajectory
from tests.cli import agentrl

FILE = Path(__file__).parents[2] / "recipes" / "bench-local.toml"


def recipe(*overrides: str) -> Recipe:
    return load(FILE, overrides=overrides)


# --- arms -------------------------------------------------------------------------------------------------------------


def test_the_ladders_arms_differ_one_thing_at_a_time() -> None:
    arms = collect.arms_of(recipe("window.attempts=40"), FILE)
    trials = [(arm.trial.weights, arm.trial.per_request, arm.trial.pooled) for arm in arms]
    switches = ((True, True), (False, True), *[(False, False)] * 3)
    assert trials == [("collected", *rest) for rest in switches]
    narrow, _, _, full, wider = (arm.recipe for arm in arms)
    assert [arm.recipe == narrow for arm in arms] == [True, True, True, False, False]
    assert (wider.window_groups, wider.window_attempts) == (2 * 8, 2 * 40)
    assert (narrow.window_groups, narrow.window_attempts) == (4, 40)
    assert msgspec.structs.replace(full, window=narrow.window) == narrow
    assert full.window == recipe("window.attempts=40").window


def test_all_of_a_batch_can_run_in_the_arms_without_surplus() -> None:
    narrow = collect.arms_of(recipe("window.attempts=8", "batch.spare=1"), FILE)[0].recipe
    assert narrow.window_attempts == 4 * (8 + 1)


def test_publication_has_both_references_and_the_matrix() -> None:
    arms = publish.arms_of(recipe(), FILE, full=False)
    assert [arm.trial.weights for arm in arms] == ["collected", "unpublished", *["published"] * 5]
    assert [(a.recipe.publish.order, a.recipe.publish.in_flight) for a in arms[2:]] == list(publish.USUAL)
    full = publish.arms_of(recipe(), FILE, full=True)[2:]
    assert len({arm.name for arm in full}) == len(full) == 2 * 4 * 2
    assert {arm.recipe.freshness.K for arm in full} == {2, 4}
    same = {msgspec.json.encode(_but(arm.recipe, "publish", "freshness")) for arm in full}
    assert len(same) == 1


def test_publication_may_be_narrowed_to_what_one_would_use() -> None:
    arms = publish.arms_of(recipe(), FILE, full=False, in_flight=["finish"])
    assert [arm.name for arm in arms] == [publish.UNTRAINED, publish.UNPUBLISHED, "rolling, finish, K = 4"]
    text = printed(publish.sheet(recipe(), runs_of(arms, 1.0, 2.0, 3.0), 1.0))
    assert "aims" not in text


def _but(recipe: Recipe, *sections: str) -> Recipe:
    return msgspec.structs.replace(recipe, **{name: type(getattr(recipe, name))() for name in sections})


@pytest.mark.parametrize(
    ("what", "override", "key"),
    [
        ("collect", "window.groups=4", "window.groups"),
        ("collect", "schedule.mode=sync", "schedule.mode"),
        ("collect", 'engines.attach=["http://127.0.0.1:1", "http://127.0.0.1:2"]', "engines.attach"),
        ("collect", "sandbox.attach=/nowhere", "sandbox.attach"),
        ("collect", "steps=3", "steps"),
        ("publish", "engines.count=1", "engines.count"),
        ("publish", "train.embedded=false", "train.embedded"),
        ("publish", "steps=3", "steps"),
    ],
)
def test_what_cannot_be_compared_is_one_error_before_anything_starts(
    what: str, override: str, key: str, tmp_path: Path
) -> None:
    done = agentrl("bench", what, FILE, "--set", override, "--out", tmp_path / "out")
    assert done.code == 2
    assert f"{FILE}: {key}: " in done.err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="something is there"):
        play.ready(recipe(), FILE, (), tmp_path)


def test_the_order_of_arms_rotates_and_seeds_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[str, int]] = []

    async def _play(recipe: Recipe, trial: Trial, folder: Path, tell: Any) -> dict[str, Any]:
        played.append((folder.name, recipe.seed))
        return {"mean_s": 1.0}

    monkeypatch.setattr(play, "_play", _play)
    arms = [play.Arm(name=name, recipe=recipe(), trial=Trial()) for name in ("a", "b, c", "d")]
    runs, _ = play.play_all(arms, 2, tmp_path, lambda *told: None, lambda line: None)
    assert played == [("a-1", 0), ("b-c-1", 0), ("d-1", 0), ("b-c-2", 1), ("d-2", 1), ("a-2", 1)]
    assert [len(each) for each in runs.values()] == [2, 2, 2]


# --- arithmetic -------------------------------------------------------------------------------------------------------


def step(number: int, interval_s: float, **more: Any) -> dict[str, Any]:
    made = {
        "step": number,
        "interval_s": interval_s,
        "train_s": 0.5,
        "publish_s": 0.25,
        "batch_wait_s": 1.0,
        "trajectories": 32,
        "reward_mean": 0.5,
        "age": {"max": 1, "mean": 0.5, "histogram": {"0": 16, "1": 16}},
        "tokens": {"generated": 100, "wasted": 10},
    }
    return made | more


def summary(*intervals: float) -> dict[str, Any]:
    """Of which the first two steps and publications are unlike all others."""
    cold = {"tokens": {"generated": 9_999, "wasted": 9_999}, "age": {"max": 9, "mean": 9.0, "histogram": {"9": 32}}}
    swaps = [{"pause_s": 0.1, "stage_s": 0.2, "lost_tokens": 3}, {"pause_s": 0.3, "stage_s": 0.2, "lost_tokens": 4}]
    far = [{"pause_s": 99.0, "stage_s": 99.0, "lost_tokens": 999}]
    steps = [step(1, 50.0, **cold), step(2, 60.0, **cold)]
    steps += [step(number, seconds) for number, seconds in enumerate(intervals, 3)]
    return {
        "steps": steps,
        "publications": [
            {"version": v, "lost_tokens": 999 if v < 3 else 7, "engines": far if v < 3 else swaps}
            for v in range(1, len(steps) + 1)
        ],
        "groups": {"dropped_stale": 2, "dropped_failed": 1},
        "attempts": {"retried": 0, "restarted": 5, "fallbacks": 1, "turns_regenerated": 2},
        "length_ratio": 0.99,
    }


def test_the_first_steps_count_for_nothing() -> None:
    found = sheet.measured(summary(1.0, 2.0, 6.0), [a_trajectory()])
    assert (found["mean_s"], found["median_s"], found["intervals_s"]) == (3.0, 2.0, [1.0, 2.0, 6.0])
    assert found["trajectories_per_min"] == pytest.approx(60 * 96 / 9)
    assert (found["generated"], found["wasted"], found["wasted_share"]) == (100, 10, 0.1)
    assert (found["age_max"], found["age_mean"], found["ages"]) == (1, 0.5, {"0": 48, "1": 48})
    assert (found["lost"], found["stage_s"], found["pauses_s"]) == (7.0, 0.2, [0.1, 0.3] * 3)
    assert found["dropped"] == 3


def test_reuse_is_of_all_prompt_tokens() -> None:
    trajectory = a_trajectory()
    turn = msgspec.structs.replace(trajectory.turns[0], prompt_tokens=100, cached_tokens=25, reusable_tokens=25)
    found = sheet.measured(summary(1.0, 1.0), [msgspec.structs.replace(trajectory, turns=(turn,))])
    assert found["reuse"] == 0.25


def test_differences_are_taken_seed_by_seed() -> None:
    before, after = [{"mean_s": 10.0}, {"mean_s": 20.0}], [{"mean_s": 5.0}, {"mean_s": 19.0}]
    assert sheet.saved(before, after) == [5.0, 1.0]
    assert sheet.less(before, after) == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize(
    ("values", "most", "verdict"),
    [
        ((0.70, 0.71, 0.72), False, "met"),
        ((0.50, 0.51, 0.52), False, "MISSED"),
        ((0.50, 0.71, 0.90), False, "not settled"),
        ((0.99,), False, "not settled"),
        ((0.50, 0.51, 0.52), True, "met"),
        ((0.70, 0.71, 0.72), True, "MISSED"),
    ],
)
def test_an_aim_is_met_only_beyond_the_spread(values: tuple[float, ...], most: bool, verdict: str) -> None:
    assert Aim(what="x", aim=0.669, values=values, most=most).verdict == verdict


def runs_of(arms: tuple[play.Arm, ...], *means: float) -> play.Runs:
    cpu = {"engines": 0.4, "sandboxes": 1.6, "trainer": 0.0, "controller": 0.4}
    found = {}
    for arm, seconds in zip(arms, means, strict=True):
        each = [sheet.measured(summary(seconds, seconds + d), [a_trajectory()]) | {"cpu_s": cpu} for d in (0.1, 0.2)]
        found[arm.name] = each
    return found


def printed(drawn: Any) -> str:
    to = io.StringIO()
    _draw_sheet(Console(width=240, file=to), drawn)
    return to.getvalue()


def test_the_ladders_sheet_says_what_was_aimed_at_and_what_the_cpus_allow(tmp_path: Path) -> None:
    arms = collect.arms_of(recipe(), FILE)
    made = collect.sheet(recipe(), runs_of(arms, 4.0, 3.0, 3.0, 2.4, 1.0), 1.0)
    text = printed(made)
    assert "at least 66.9 %" in text
    assert "MISSED" in text
    steps = made.tables[1]
    assert [row[0] for row in steps.rows] == [*(arm.name for arm in arms[1:4]), "all together"]
    assert steps.rows[0][1].startswith("-1.00")
    floor = made.tables[2].rows[0]
    assert floor[-2] == f"{2.4 / made.data['cpus']:.2f}"
    [picture] = draw(made, tmp_path)
    assert picture.stat().st_size > 5_000
    assert msgspec.json.decode(msgspec.json.encode(made))["data"]["arms"].keys() == made.data["arms"].keys()


def test_what_publication_adds_is_against_the_step_with_nothing_published(tmp_path: Path) -> None:
    arms = publish.arms_of(recipe(), FILE, full=False)
    made = publish.sheet(recipe(), runs_of(arms, 1.0, 2.0, 3.0, 2.02, 2.5, 2.5, 4.0), 1.0)
    rows = {row[0]: row for row in made.tables[0].rows}
    assert rows[publish.UNPUBLISHED][4:] == ("", "", "")
    assert rows["rolling, continue, K = 4"][4].startswith("+0.02")
    assert rows["rolling, continue, K = 4"][6].startswith("-0.98")
    assert rows["all, continue, K = 4"][4:] == ("+1.00 ± 0.00", "+48.2 ± 5.6 %", "")
    assert "at most 5 %" in printed(made)
    assert [path.name for path in draw(made, tmp_path)] == ["bench-local-publish.png"]


# --- a trainer whose weights go nowhere -------------------------------------------------------------------------------


class Asked:
    """ports.Trainer that asks for more before its step is reported, as a fast one does. `outer`: what is around it."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.outer: Unpublished | None = None
        self.waiting: asyncio.Task[Version] | None = None

    async def wait_ready(self) -> Version:
        return Version(len(self.batches))

    async def step(self, batch: Batch) -> StepReport:
        assert self.outer is not None
        self.batches.append(batch)
        self.waiting = asyncio.create_task(self.outer.wait_ready())
        return StepReport(batch=batch.id, version=Version(batch.version + 1), seconds=1.0)

    async def aclose(self) -> None: ...


class Pruned:
    """ports.WeightStore as far as it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[Version, ...]]] = []

    def prune(self, keep: int, pinned: tuple[Version, ...] = ()) -> None:
        self.calls.append((keep, pinned))


def test_an_unpublished_trainer_goes_on_and_the_run_stays_where_it_was() -> None:
    inner, store = Asked(), Pruned()
    trainer = inner.outer = Unpublished(inner, store, 3)  # type: ignore[arg-type]
    trajectory = a_trajectory()
    proof = GroupProof(group=GroupId(0), oldest=Version(0), tokens=((Version(0), 5),))

    async def main() -> list[StepReport]:
        reports = []
        for number in range(3):
            batch = Batch(id=number, version=Version(0), bound=4, proofs=(proof,), trajectories=(trajectory,))
            reports.append(await trainer.step(batch))
            assert inner.waiting is not None
            assert not inner.waiting.done()  # the run would take it for news of the step before
            assert await inner.waiting == 0
        return reports

    assert [report.version for report in asyncio.run(main())] == [0, 0, 0]
    assert [batch.version for batch in inner.batches] == [0, 1, 2]
    last = inner.batches[-1]
    assert {span.version for t in last.trajectories for span in t.spans} == {2}
    assert last.proofs[0].tokens == ((2, 5),)
    assert store.calls[-1] == (3, (Version(0),))  # what the engines serve stays


# --- a balancer without memory ----------------------------------------------------------------------------------------


def test_scattered_calls_reach_every_rank_whatever_the_scheduler_said() -> None:
    engines = {"e0": object(), "e1": object()}
    scatter = Scatter(engines, 2, Random(0))
    assert {str(scatter.place) for _ in range(100)} == {"e0/0", "e0/1", "e1/0", "e1/1"}
    del engines["e0"]  # lost: the registry is the run's own
    assert {scatter.place.engine for _ in range(20)} == {"e1"}
    engines.clear()
    assert scatter.place.engine == ""  # no such engine: the call fails as one to a lost engine does
