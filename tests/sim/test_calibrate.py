"""A live run's measures as a simulated fleet: lines through points, traces without end, a fit that finds itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from agentrl.bench import calibrate
from agentrl.errors import UserError
from agentrl.recipe.load import load_sim
from agentrl.recipe.schema import Batch, Recipe, Window
from agentrl.recipe.sim import SimRecipe
from agentrl.records import AttemptId, GroupId, Lane, Place, Span, Stop, Trajectory, Turn, Verdict, Version
from agentrl.sim.fleet import trace
from agentrl.sim.fleet.build import costs_of, plans_of
from agentrl.sim.fleet.measured import Measured
from agentrl.sim.fleet.roofline import Work
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
        ended_s=began + 1.0,
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
        "steps": [{"interval_s": interval_s, "train_s": 0.05} for _ in range(steps)],
        "publications": [{"engines": [{"stage_s": 0.01, "pause_s": 0.002}]}],
    }
    recipe = Recipe(name="r", batch=Batch(groups=2, siblings=members), window=Window(groups=4))
    return Recorded(Path("run"), recipe, summary, found)


def test_a_line_is_found_through_decode_times() -> None:
    turns = [turn(0, 100.0 * running, running) for running in (1, 2, 3, 4) for _ in range(running)]
    step_s, sequence_s = calibrate._decoding(turns)
    assert (step_s, sequence_s) == pytest.approx((STEP_S, SEQUENCE_S))


def test_what_is_measured() -> None:
    measures = calibrate.measure(recorded())
    assert measures.turn_s == pytest.approx(0.01)
    assert measures.prefill_token_s == pytest.approx(0.001)
    assert measures.quiet == pytest.approx(0.05 / 0.0625)
    assert measures.mean_s == measures.median_s == 0.5
    assert measures.step_s + 4 * measures.sequence_s == pytest.approx(STEP_S + 4 * SEQUENCE_S)


def test_the_fit_brings_the_runs_own_interval_back_and_predicts_a_deeper_window(tmp_path: Path) -> None:
    run, path = recorded(interval_s=0.9), tmp_path / "trace.jsonl"
    measures = calibrate.fit(run, path, cpus=2)
    recipe = calibrate.recipe_of(run, measures, path, cpus=2)
    assert calibrate.predict(recipe).mean_s == pytest.approx(0.9, rel=0.1)
    assert 0 < measures.attempt_s < 1
    wide = msgspec.structs.replace(recipe, policy=msgspec.structs.replace(recipe.policy, window_groups=16))
    assert calibrate.predict(wide).mean_s < 0.9


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
