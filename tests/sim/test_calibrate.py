"""A live run's measures as a simulated fleet: lines through points, traces without end, a fit that finds itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from agentrl.bench import calibrate
from agentrl.bench.fleet import Recorder, simulate
from agentrl.bench.observed import KINDS, simulated
from agentrl.errors import UserError
from agentrl.recipe.load import load_sim
from agentrl.recipe.schema import Batch as Batch_
from agentrl.recipe.schema import Recipe, Window
from agentrl.recipe.sim import SimRecipe
from agentrl.records import (
    AttemptId,
    Batch,
    GroupId,
    Lane,
    Place,
    Span,
    StepReport,
    Stop,
    Trajectory,
    Turn,
    Verdict,
    Version,
)
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.sim.fleet import trace
from agentrl.sim.fleet.build import costs_of, plans_of
from agentrl.sim.fleet.measured import Measured
from agentrl.sim.fleet.roofline import Work
from agentrl.wiring.fleet import Options
from agentrl.wiring.recorded import Recorded, read

STEP_S, SEQUENCE_S = 0.004, 0.001


def turn(index: int, began: float, running: int, tokens: int = 10) -> Turn:
    decode = tokens * (STEP_S + running * SEQUENCE_S)
    return Turn(
        index=index,
        start=50 * (index + 1),
        end=50 * (index + 1) + tokens,
        observed_end=50 * (index + 2),
        place=Place("e0", 0),
        prompt_tokens=50,
        cached_tokens=30,
        reusable_tokens=30,
        command="true",
        lane=Lane.COMMAND,
        began_s=began,
        engine_s=0.02 + decode,
        prefill_s=0.02,
        decode_s=decode,
        tool_s=0.03,
    )


def trajectory(group: int, member: int, began: float, running: int) -> Trajectory:
    first = turn(0, began, running)
    second = turn(1, began + first.engine_s + first.tool_s + 0.01, running)
    tokens = second.observed_end
    return Trajectory(
        attempt=AttemptId(GroupId(group), member, 0),
        task=f"task-{group}",  # type: ignore[arg-type]
        kind="kind",
        tokens=(1,) * tokens,
        trainable=(True,) * tokens,
        logprobs=(0.0,) * tokens,
        spans=(Span(0, tokens, Version(0)),),
        turns=(first, second),
        stop=Stop.SUBMITTED,
        verdict=Verdict(reward=1.0, verify_s=0.05 if member else 0.1),
        began_s=began,
        ended_s=began + 0.27 + (0.05 if member else 0.1) + 0.02,
        open_s=0.04,
    )


def recorded(steps: int = 8, interval_s: float = 0.5, groups: int = 12) -> Recorded:
    """Waves of conversations that overlap exactly."""
    members = 4
    found = [
        trajectory(group, member, began=10.0 * group, running=members)
        for group in range(groups)
        for member in range(members)
    ]
    summary: dict[str, Any] = {
        "seed": 1,
        "steps": [
            {"interval_s": interval_s, "train_s": 0.03 + 1e-4 * tokens, "tokens": {"trained": tokens}}
            for tokens in range(100, 100 + 10 * steps, 10)
        ],
        "publications": [{"engines": [{"stage_s": 0.01, "pause_s": 0.002}]}],
    }
    recipe = Recipe(name="r", batch=Batch_(groups=2, siblings=members), window=Window(groups=4))
    return Recorded(Path("run"), recipe, summary, found)


def test_a_line_is_found_through_decode_times() -> None:
    turns = [turn(0, 100.0 * running, running) for running in (1, 2, 3, 4) for _ in range(running)]
    step_s, sequence_s = calibrate._decoding(turns)
    assert (step_s, sequence_s) == pytest.approx((STEP_S, SEQUENCE_S))


def test_what_is_measured() -> None:
    measures = calibrate.measure(recorded())
    seen = measures.seen
    assert (seen.engine, seen.turn, seen.command) == pytest.approx((0.1, 0.01, 0.03))
    assert (seen.opening, seen.verify, seen.grading) == pytest.approx((0.04, 0.0625, 0.02))
    assert measures.prefill_token_s == pytest.approx(0.001)
    assert (measures.train_s, measures.train_token_s) == pytest.approx((0.03, 1e-4))
    assert seen.mean_s == seen.median_s == 0.5
    assert measures.step_s + 4 * measures.sequence_s == pytest.approx(STEP_S + 4 * SEQUENCE_S)


class AsIfLive(Recorder):
    """A simulated run, recorded as live ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.played: dict[AttemptId, list[Turn]] = defaultdict(list)
        self.kept: list[Trajectory] = []
        self.steps: list[dict[str, Any]] = []

    def turn(self, attempt: AttemptId, turn: Turn) -> None:
        super().turn(attempt, turn)
        self.played[attempt].append(turn)

    def stepped(self, batch: Batch, report: StepReport) -> None:
        trained = sum(tokens for proof in batch.proofs for _, tokens in proof.tokens)
        self.steps.append({"train_s": report.seconds, "tokens": {"trained": trained}})

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        if isinstance(event, news.AttemptEnded):
            facts, turns = event.facts, self.played[event.facts.attempt]
            ended = msgspec.structs.replace(
                trajectory(0, 0, 0.0, 1),
                attempt=facts.attempt,
                turns=tuple(turns),
                verdict=Verdict(reward=1.0, verify_s=facts.verify_s, queue_s=facts.verify_wait_s),
                ended_s=now,
                open_s=facts.open_s,
            )
            self.kept.append(ended)
        super().heard(now, event, commands, core)


def test_a_run_of_known_work_is_found_again_and_others_are_predicted(tmp_path: Path) -> None:
    model, path = recorded(steps=10), tmp_path / "truth.jsonl"
    measures = msgspec.structs.replace(calibrate.measure(model), work=dict.fromkeys(KINDS, 0.5), start_s=0.2)
    trace.write(path, calibrate.lines(model, measures))
    truth = calibrate.recipe_of(model, measures, path, cpus=2)
    listener = AsIfLive()
    simulate(truth, 7, Options(), listener, watch=listener.watch)
    assert listener.fleet is not None
    intervals = listener.result(listener.fleet.core)["intervals_s"]
    for step, interval_s in zip(listener.steps, [1.0, 1.0, *intervals], strict=True):
        step["interval_s"] = interval_s
    run = replace(model, trajectories=listener.kept, summary=model.summary | {"steps": listener.steps})

    found, shown = calibrate.fit(run, tmp_path / "trace.jsonl", cpus=2)
    assert shown.mean_s == pytest.approx(found.seen.mean_s, rel=0.1)
    for kind in KINDS:
        assert getattr(shown, kind) == pytest.approx(getattr(found.seen, kind), rel=0.25), kind
    other = replace(run, recipe=msgspec.structs.replace(run.recipe, batch=Batch_(groups=4, siblings=4)))
    aim = simulated(calibrate.recipe_of(other, measures, path, cpus=2), 2).mean_s
    told = simulated(calibrate.recipe_of(other, found, tmp_path / "trace.jsonl", cpus=2), 2).mean_s
    assert aim > 1.5 * found.seen.mean_s
    assert told == pytest.approx(aim, rel=0.15)


def test_a_kind_never_measured_keeps_its_share() -> None:
    seen = calibrate.live(recorded())
    none = msgspec.structs.replace(seen, opening=0.0)
    assert calibrate._nearer(0.3, "opening", none, seen) == 0.3
    assert calibrate._nearer(0.3, "opening", seen, seen) == pytest.approx(0.3)
    assert calibrate._nearer(0.3, "opening", seen, msgspec.structs.replace(seen, opening=0.08)) < 0.3


def test_steps_in_bunches_have_a_mean_that_a_median_does_not_tell() -> None:
    run = recorded(steps=9)
    for index, step in enumerate(run.summary["steps"]):
        step["interval_s"] = 0.6 if index % 2 else 3.6
    assert calibrate.interval(run) == pytest.approx(((4 * 3.6 + 3 * 0.6) / 7, 3.6))


def test_too_short_a_run_is_refused() -> None:
    with pytest.raises(UserError, match="too few"):
        calibrate.measure(recorded(steps=3))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.toml"):
        read(tmp_path)


def test_a_trace_goes_on_beyond_what_was_recorded(tmp_path: Path) -> None:
    run, path = recorded(), tmp_path / "trace.jsonl"
    trace.write(path, calibrate.lines(run, calibrate.measure(run)))
    known = trace.Trace.load(path)
    again = trace.Again(known, seed=3)
    assert again.plan("t5", 2) == known.plan("t5", 2)
    drawn = [again.plan(f"t{n}", 0) for n in range(100, 120)]
    assert drawn == [trace.Again(known, seed=3).plan(f"t{n}", 0) for n in range(100, 120)]
    assert set(drawn) <= {known.plan(group, 0) for group in known.groups}


def test_a_calibrated_recipe_is_a_recipe(tmp_path: Path) -> None:
    run, path = recorded(), tmp_path / "trace.jsonl"
    measures = calibrate.measure(run)
    trace.write(path, calibrate.lines(run, measures))
    recipe = calibrate.recipe_of(run, measures, path, cpus=2)
    file = tmp_path / "calibrated.toml"
    file.write_text(tomli_w.dumps(msgspec.to_builtins(recipe)))
    loaded: SimRecipe = load_sim(file)
    assert loaded == recipe
    assert isinstance(costs_of(loaded), Measured)
    assert plans_of(loaded, 0).plan("t0", 0).turns[0].new_tokens == 10


def test_measured_steps_grow_with_what_runs_and_what_is_prefilled() -> None:
    run = recorded()
    measures = calibrate.measure(run)
    engine = calibrate.recipe_of(run, measures, Path("t"), cpus=2).fleet.measured
    assert engine is not None
    costs = Measured(engine)
    one, _ = costs.step([Work(running=1)], 1.0)
    four, growth = costs.step([Work(running=4)], 1.0)
    assert four - one == pytest.approx(3 * engine.sequence_s)
    assert growth == 0.0
    assert costs.step([Work(running=1, chunk=100.0)], 1.0)[0] - one == pytest.approx(100 * engine.prefill_token_s)
    assert costs.step([Work(running=1)], 2.0)[0] == pytest.approx(2 * one)
