"""`agentrl bench calibrate RUN`: a live run as a recipe of the simulated fleet, and what that predicts of other runs.

A live run's times are those of a busy machine. What they come to undisturbed is found by simulating the run: engines,
sandboxes, trainer and controller share the simulated machine's CPUs, and the work of each kind is scaled until that
kind takes as long in the simulation as it did live. Closing a sandbox, for which nobody waits, is taken to be as much
work as opening it. One number is fitted to the run's own mean interval: how long an attempt takes to begin, which no
record names. Nothing is fitted to a run that is predicted. What else the machine did is in the measures: predict runs
that had the machine as much to themselves.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import msgspec

from agentrl.bench.observed import KINDS, Interval, Observed, interval, live, simulated
from agentrl.bench.sim.sheet import Sheet, Table
from agentrl.errors import UserError
from agentrl.recipe.sim import Controller, Engine, Fleet, SimPolicy, SimRecipe, SimTrainer, Workload
from agentrl.records import Lane, Record, Trajectory, Turn
from agentrl.sim.fleet import trace
from agentrl.sim.fleet.ops import AttemptPlan, Op, TurnPlan
from agentrl.wiring.derive import policy_of
from agentrl.wiring.plan import plan
from agentrl.wiring.recorded import Recorded, read

SEEDS = 4  # simulations of which the mean is the prediction
_ROUNDS = 16  # of fitting, each of one simulation
_GAIN = 0.6  # of what is missing, made up for in one round
_FIRST = 0.2  # share of a measured time that is work, to begin with, and
_LEAST = 1e-3  # the smallest


class Measures(Record):
    """Of one live run, seconds. work: by kind, the share of the measured time that the same work takes undisturbed."""

    seen: Observed
    step_s: float
    sequence_s: float
    prefill_token_s: float
    train_s: float
    train_token_s: float  # more for each trained token
    stage_s: float
    swap_s: float
    work: dict[str, float]
    start_s: float = 0.0  # fitted: of an attempt before its sandbox is asked for


def measure(run: Recorded) -> Measures:
    turns = [turn for trajectory in run.trajectories for turn in trajectory.turns]
    step_s, sequence_s = _decoding(turns)
    fresh = [turn for turn in turns if turn.prompt_tokens > turn.cached_tokens]
    swaps = [engine for publication in run.summary["publications"] for engine in publication["engines"]]
    train_s, train_token_s = _line(
        [step["tokens"]["trained"] for step in run.steps], [step["train_s"] for step in run.steps]
    )
    return Measures(
        seen=live(run),
        step_s=step_s,
        sequence_s=sequence_s,
        prefill_token_s=median(turn.prefill_s / (turn.prompt_tokens - turn.cached_tokens) for turn in fresh),
        train_s=train_s,
        train_token_s=train_token_s,
        stage_s=fmean(swap["stage_s"] for swap in swaps) if swaps else 0.0,
        swap_s=fmean(swap["pause_s"] for swap in swaps) if swaps else 0.0,
        work=dict.fromkeys(KINDS, _FIRST),
    )


def _decoding(turns: Iterable[Turn]) -> tuple[float, float]:
    """(seconds of a step, more for each sequence): a line through decode seconds per token over how many ran."""
    by_engine: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_engine[str(turn.place)].append(turn)
    running, seconds = [], []
    for here in by_engine.values():
        begins = sorted(turn.began_s for turn in here)
        ends = sorted(turn.began_s + turn.engine_s for turn in here)
        for turn in here:
            tokens = turn.end - turn.start
            if tokens > 1 and turn.decode_s > 0:
                middle = turn.began_s + turn.engine_s / 2
                running.append(bisect_right(begins, middle) - bisect_left(ends, middle))
                seconds.append(turn.decode_s / tokens)
    at_zero, slope = _line(running, seconds)
    return max(1e-6, at_zero), slope


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(at zero, slope) of the line through the points, neither below zero."""
    if len(set(xs)) < 2:
        return fmean(ys), 0.0
    slope = min(max(0.0, linear_regression(xs, ys).slope), fmean(ys) / fmean(xs))
    return fmean(ys) - slope * fmean(xs), slope


# --- as a simulation --------------------------------------------------------------------------------------------------


def lines(run: Recorded, measures: Measures) -> list[trace.Line]:
    """The run's whole groups as a trace, in the order in which they were opened, named as the simulation asks."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in run.trajectories:
        groups[trajectory.attempt.group].append(trajectory)
    whole = [groups[group] for group in sorted(groups) if len(groups[group]) >= run.recipe.batch.siblings]
    if not whole:
        raise UserError(f"{run.folder}: no whole group was kept", hint="calibrate on a run that took steps")
    return [
        trace.Line(group=f"t{index}", member=member, plan=plan_of(trajectory, measures))
        for index, group in enumerate(whole)
        for member, trajectory in enumerate(sorted(group, key=lambda t: t.attempt.member))
    ]


def plan_of(trajectory: Trajectory, measures: Measures) -> AttemptPlan:
    work = measures.work
    turns = tuple(
        TurnPlan(
            turn.end - turn.start,
            turn.observed_end - turn.end,
            None if turn.lane is None else Op(turn.lane, work["command"] * turn.tool_s),
        )
        for turn in trajectory.turns
    )
    return AttemptPlan(
        opening=trajectory.turns[0].start,
        turns=turns,
        stop=trajectory.stop,
        reward=trajectory.verdict.reward or 0.0,
        reset=Op(Lane.RESET, work["opening"] * trajectory.open_s),
        verify=Op(Lane.VERIFY, work["verify"] * trajectory.verdict.verify_s),
        cleanup=Op(Lane.CLEANUP, work["opening"] * trajectory.open_s),
    )


def recipe_of(run: Recorded, measures: Measures, trace_path: Path, *, cpus: int) -> SimRecipe:
    """The simulated fleet of `run`'s recipe with these measures: its window, batch and bounds, one shared machine."""
    found, policy, work = run.recipe, policy_of(run.recipe), measures.work
    engine = Engine(
        step_s=work["engine"] * measures.step_s,
        sequence_s=work["engine"] * measures.sequence_s,
        prefill_token_s=work["engine"] * measures.prefill_token_s,
        stage_s=measures.stage_s,
        swap_s=measures.swap_s,
        ranks=found.engines.ranks,
        slots=found.engines.slots,
        kv_tokens=found.engines.kv_tokens,
        threads=found.engines.threads,
    )
    return SimRecipe(
        name=f"{found.name}-calibrated",
        seed=found.seed,
        steps=len(run.steps),
        fleet=Fleet(
            hosts=1,
            engines_per_host=found.engines.count,
            measured=engine,
            cpus_per_host=cpus,
            serving_cpus=0,
            lanes="pooled",
            lane_caps={line.lane: line.cap for line in plan(found).lanes},
            controller=Controller(
                start_s=measures.start_s,
                turn_s=work["turn"] * measures.seen.turn,
                attempt_s=work["grading"] * measures.seen.grading,
            ),
            sandboxes_per_host=found.sandbox.max_live,
        ),
        workload=Workload(trace=str(trace_path)),
        policy=SimPolicy(
            groups=policy.groups,
            siblings=policy.siblings,
            spare=policy.spare,
            window_groups=policy.window_groups,
            window_attempts=policy.window_attempts,
            K=policy.bound,
            retries=policy.retries,
            move_margin=policy.move_margin,
            when_stale=found.freshness.when_stale,
            mode=found.schedule.mode,
            round_groups=policy.round_groups,
            admission=found.schedule.admission,
        ),
        trainer=SimTrainer(
            step_s=work["trainer"] * measures.train_s,
            token_s=work["trainer"] * measures.train_token_s,
            threads=found.train.threads,
        ),
        publish=found.publish,
    )


def fit(run: Recorded, trace_path: Path, *, cpus: int) -> tuple[Measures, Observed]:
    """The run's measures, each kind's work such that it takes in the simulation as long as it did live, and what the
    simulation shows then. The trace is left at the path."""
    measures = measure(run)
    for _ in range(_ROUNDS):
        trace.write(trace_path, lines(run, measures))
        shown = simulated(recipe_of(run, measures, trace_path, cpus=cpus), 1)
        measures = msgspec.structs.replace(
            measures,
            work={kind: _nearer(share, kind, measures.seen, shown) for kind, share in measures.work.items()},
            start_s=max(0.0, measures.start_s + measures.seen.mean_s - shown.mean_s),
        )
    trace.write(trace_path, lines(run, measures))
    return measures, simulated(recipe_of(run, measures, trace_path, cpus=cpus), 1)


def _nearer(share: float, kind: str, seen: Observed, shown: Observed) -> float:
    aim, now = getattr(seen, kind), getattr(shown, kind)
    return min(1.0, max(_LEAST, share * (aim / now) ** _GAIN)) if aim > 0 and now > 0 else share


# --- the bench --------------------------------------------------------------------------------------------------------


def main(folder: Path, against: Sequence[Path], *, cpus: int = 0) -> Sheet:
    """Calibrates on `folder`, leaves `calibrated.jsonl` (the trace) there, and predicts the runs in `against`. On the
    machine that ran them, or one with as many CPUs: lanes are as wide as there."""
    cpus = cpus or len(os.sched_getaffinity(0))
    run, others = read(folder), [read(other) for other in against]
    path = folder / "calibrated.jsonl"
    measures, shown = fit(run, path, cpus=cpus)
    rows = [_row(run, measures, path, cpus, "calibrated on")]
    rows += [_row(other, measures, path, cpus, "predicted") for other in others]
    table = Table(
        title="seconds from step to step: live (measured) and simulated",
        columns=(
            *("run", "", ">seed", ">batch", ">window", ">attempts"),
            *(">live median", ">simulated", ">error", ">live mean", ">simulated", ">error"),
        ),
        rows=tuple(row[0] for row in rows),
    )
    return Sheet(
        arm="calibrate",
        recipe=run.recipe.name,
        seeds=SEEDS,
        tables=(table, _kinds(measures, shown)),
        notes=(
            "work: what the simulated machine is given to do, so that it takes as long there as it did live, where"
            f" everything shares {cpus} CPUs",
            f"fitted to the first run's own mean: an attempt takes {1e3 * measures.start_s:.0f} ms to begin",
            f"trace: {path}",
        ),
        data={
            "measures": msgspec.to_builtins(measures),
            "simulated": msgspec.to_builtins(shown),
            "runs": [row[1] for row in rows],
            "recipe": msgspec.to_builtins(recipe_of(run, measures, path, cpus=cpus)),
        },
    )


def _kinds(measures: Measures, shown: Observed) -> Table:
    rows = []
    for kind in KINDS:
        seen = getattr(measures.seen, kind)
        rows.append((kind, *(f"{1e3 * ms:.1f}" for ms in (seen, getattr(shown, kind), measures.work[kind] * seen))))
    return Table(title="of the first run", columns=("", ">live ms", ">simulated ms", ">work ms"), rows=tuple(rows))


def _row(run: Recorded, measures: Measures, path: Path, cpus: int, role: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    recipe = recipe_of(run, measures, path, cpus=cpus)
    found, shown = interval(run), simulated(recipe, SEEDS)
    told = Interval(shown.mean_s, shown.median_s)
    errors = Interval(*(b / a - 1 for a, b in zip(found, told, strict=True)))
    cells = (
        run.folder.name,
        role,
        f"{run.summary['seed']}",
        *(f"{n}" for n in (recipe.policy.groups, recipe.policy.window_groups, recipe.window_attempts)),
        *(f"{found.median_s:.2f}", f"{told.median_s:.2f}", f"{errors.median_s:+.0%}"),
        *(f"{found.mean_s:.2f}", f"{told.mean_s:.2f}", f"{errors.mean_s:+.0%}"),
    )
    figures = {"live": found._asdict(), "simulated": told._asdict(), "error": errors._asdict()}
    return cells, {"run": str(run.folder), "role": role, **figures}
