"""`agentrl bench calibrate RUN`: a live run as a recipe of the simulated fleet, and what that predicts of other runs.

Measured: how long a step of an engine takes by how many decode, prefill by the token, operations, verification, the
trainer's step, staging and loading of weights. All that was measured while the machine was busy; `quiet` is the share
of it that the same work takes undisturbed, and the simulated machine's CPUs, shared by all, bring the rest back. One
number is not measured but fitted, to the run itself: CPU seconds of an attempt outside engines and tools (its sandbox
opened and closed, the controller's own work), or `quiet` where those come to less than nothing. Nothing is fitted to a
run that is predicted. What else the machine did is in the measures: predict runs that had the machine as much to
themselves.

Fitted is the mean interval, and the median is reported beside it: where the window is a whole number of batches, steps
come in bunches (3.6 s, 0.6 s, 3.6 s, ...), live as well as simulated, and a median between two peaks says little.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple

import msgspec

from agentrl.bench.fleet import play
from agentrl.bench.sim.sheet import Sheet, Table
from agentrl.errors import UserError
from agentrl.recipe.sim import Engine, Fleet, SimPolicy, SimRecipe, SimTrainer, Workload
from agentrl.records import Lane, Record, Trajectory, Turn
from agentrl.sim.fleet import trace
from agentrl.sim.fleet.ops import AttemptPlan, Op, TurnPlan
from agentrl.wiring.derive import policy_of
from agentrl.wiring.fleet import Options
from agentrl.wiring.recorded import Recorded, read

WARM = 2  # first intervals left out, of runs and of simulations
SEEDS = 8  # simulations of which the mean is the prediction
_FIT = 10  # halvings, each of
_FIT_SEEDS = 3  # simulations
_MOST_S = 4.0  # CPU seconds of an attempt that are not measured


class Measures(Record):
    """Of one live run. Seconds; `quiet` is a share."""

    mean_s: float  # of the intervals
    median_s: float
    step_s: float
    sequence_s: float
    prefill_token_s: float
    turn_s: float  # of a turn outside engine and tool: HTTP, journal, controller
    train_s: float
    stage_s: float
    swap_s: float
    quiet: float
    attempt_s: float = 0.0  # fitted: CPU of an attempt that no record names


class Interval(NamedTuple):
    """Seconds between two steps."""

    mean_s: float
    median_s: float


def interval(run: Recorded) -> Interval:
    intervals = [float(step["interval_s"]) for step in run.steps[WARM:]]
    if len(intervals) < WARM:
        raise UserError(f"{run.folder}: {len(run.steps)} steps are too few", hint="run at least 6 steps")
    return Interval(fmean(intervals), median(intervals))


def measure(run: Recorded) -> Measures:
    turns = [turn for trajectory in run.trajectories for turn in trajectory.turns]
    step_s, sequence_s = _decoding(turns)
    fresh = [turn for turn in turns if turn.prompt_tokens > turn.cached_tokens]
    swaps = [engine for publication in run.summary["publications"] for engine in publication["engines"]]
    live = interval(run)
    return Measures(
        mean_s=live.mean_s,
        median_s=live.median_s,
        step_s=step_s,
        sequence_s=sequence_s,
        prefill_token_s=median(turn.prefill_s / (turn.prompt_tokens - turn.cached_tokens) for turn in fresh),
        turn_s=_between(run.trajectories),
        train_s=fmean(step["train_s"] for step in run.steps),
        stage_s=fmean(swap["stage_s"] for swap in swaps) if swaps else 0.0,
        swap_s=fmean(swap["pause_s"] for swap in swaps) if swaps else 0.0,
        quiet=_quiet(run.trajectories),
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
    slope = max(0.0, linear_regression(running, seconds).slope) if len(set(running)) > 1 else 0.0
    return max(1e-6, fmean(seconds) - slope * fmean(running)), slope


def _between(trajectories: Iterable[Trajectory]) -> float:
    """Of a turn, the time that neither the engine's clock nor the tool's accounts for."""
    spent = []
    for trajectory in trajectories:
        for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            inside = turn.queue_s + turn.prefill_s + turn.decode_s + turn.tool_wait_s + turn.tool_s
            spent.append(following.began_s - turn.began_s - inside)
    return max(0.0, median(spent)) if spent else 0.0


def _quiet(trajectories: Iterable[Trajectory]) -> float:
    """Undisturbed over mean: the fastest tenth of verifications against all, within each kind of task."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.verdict.verify_s > 0:
            kinds[trajectory.kind].append(trajectory.verdict.verify_s)
    fast = sum(sorted(seconds)[len(seconds) // 10] * len(seconds) for seconds in kinds.values())
    total = sum(sum(seconds) for seconds in kinds.values())
    return min(1.0, fast / total) if total else 1.0


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
    turns = tuple(
        TurnPlan(
            turn.end - turn.start,
            turn.observed_end - turn.end,
            Op(turn.lane or Lane.COMMAND, measures.quiet * (turn.tool_s + measures.turn_s)),
        )
        for turn in trajectory.turns
    )
    return AttemptPlan(
        opening=trajectory.turns[0].start,
        turns=turns,
        stop=trajectory.stop,
        reward=trajectory.verdict.reward or 0.0,
        reset=Op(Lane.RESET, measures.attempt_s),
        verify=Op(Lane.VERIFY, measures.quiet * trajectory.verdict.verify_s),
        cleanup=Op(Lane.CLEANUP, 0.0),
    )


def recipe_of(run: Recorded, measures: Measures, trace_path: Path, *, cpus: int) -> SimRecipe:
    """The simulated fleet of `run`'s recipe with these measures: its window, batch and bounds, one shared machine."""
    live, policy, quiet = run.recipe, policy_of(run.recipe), measures.quiet
    engine = Engine(
        step_s=quiet * measures.step_s,
        sequence_s=quiet * measures.sequence_s,
        prefill_token_s=quiet * measures.prefill_token_s,
        stage_s=measures.stage_s,
        swap_s=measures.swap_s,
        ranks=live.engines.ranks,
        slots=live.engines.slots,
        kv_tokens=live.engines.kv_tokens,
    )
    return SimRecipe(
        name=f"{live.name}-calibrated",
        seed=live.seed,
        steps=len(run.steps),
        fleet=Fleet(
            hosts=1,
            engines_per_host=live.engines.count,
            measured=engine,
            cpus_per_host=cpus,
            serving_cpus=0,
            lanes="pooled",
            sandboxes_per_host=live.sandbox.max_live,
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
            when_stale=live.freshness.when_stale,
            mode=live.schedule.mode,
            round_groups=policy.round_groups,
            admission=live.schedule.admission,
        ),
        trainer=SimTrainer(step_s=measures.train_s),
        publish=live.publish,
    )


def predict(recipe: SimRecipe, seeds: int = SEEDS) -> Interval:
    """Mean and median interval, each the mean of several seeds."""
    runs = [play(recipe, recipe.seed + 1 + seed, Options()) for seed in range(seeds)]
    return Interval(fmean(run["mean_s"] for run in runs), fmean(run["interval_s"] for run in runs))


def fit(run: Recorded, trace_path: Path, *, cpus: int) -> Measures:
    """The run's measures, with the one unknown such that its own mean interval comes out: `attempt_s`, or, where what
    was measured is already too much work, a lower `quiet`. The trace is left at the path.

    An interval grows with the work of an attempt, so halving finds it.
    """
    measures = measure(run)

    def slow(tried: Measures) -> bool:
        trace.write(trace_path, lines(run, tried))
        return predict(recipe_of(run, tried, trace_path, cpus=cpus), _FIT_SEEDS).mean_s > measures.mean_s

    field, low, high = ("quiet", 0.0, measures.quiet) if slow(measures) else ("attempt_s", 0.0, _MOST_S)
    for _ in range(_FIT):
        middle = (low + high) / 2
        low, high = (low, middle) if slow(msgspec.structs.replace(measures, **{field: middle})) else (middle, high)
    fitted = msgspec.structs.replace(measures, **{field: (low + high) / 2})
    trace.write(trace_path, lines(run, fitted))
    return fitted


# --- the bench --------------------------------------------------------------------------------------------------------


def main(folder: Path, against: Sequence[Path], *, cpus: int = 0) -> Sheet:
    """Calibrates on `folder`, leaves `calibrated.jsonl` (the trace) there, and predicts the runs in `against`."""
    cpus = cpus or len(os.sched_getaffinity(0))
    run, others = read(folder), [read(other) for other in against]
    path = folder / "calibrated.jsonl"
    measures = fit(run, path, cpus=cpus)
    rows = [_row(run, measures, path, cpus, "calibrated on")]
    rows += [_row(other, measures, path, cpus, "predicted") for other in others]
    table = Table(
        title="seconds from step to step: live (measured) and simulated",
        columns=(
            *("run", "", ">seed", ">window", ">live mean", ">simulated", ">error"),
            *(">live median", ">simulated", ">error"),
        ),
        rows=tuple(row[0] for row in rows),
    )
    shown = msgspec.to_builtins(measures)
    return Sheet(
        arm="calibrate",
        recipe=run.recipe.name,
        seeds=SEEDS,
        tables=(
            table,
            Table(
                title="measured",
                columns=("", ">ms"),
                rows=tuple((name, f"{value if name == 'quiet' else 1e3 * value:.3g}") for name, value in shown.items()),
            ),
        ),
        notes=(
            "fitted to the first run: attempt_s, CPU of an attempt outside engine and tools, or where that came to"
            " nothing quiet, the share of measured times that is work (not in ms)",
            f"simulated on {cpus} CPUs shared by all; trace: {path}",
        ),
        data={
            "measures": shown,
            "runs": [row[1] for row in rows],
            "recipe": msgspec.to_builtins(recipe_of(run, measures, path, cpus=cpus)),
        },
    )


def _row(run: Recorded, measures: Measures, path: Path, cpus: int, role: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    recipe = recipe_of(run, measures, path, cpus=cpus)
    live, simulated = interval(run), predict(recipe)
    errors = Interval(*(b / a - 1 for a, b in zip(live, simulated, strict=True)))
    pairs = zip(live, simulated, errors, strict=True)
    cells = (
        run.folder.name,
        role,
        f"{run.summary['seed']}",
        f"{recipe.policy.window_groups}",
        *(cell for a, b, error in pairs for cell in (f"{a:.2f}", f"{b:.2f}", f"{error:+.0%}")),
    )
    told = {"live": live._asdict(), "simulated": simulated._asdict(), "error": errors._asdict()}
    return cells, {"run": str(run.folder), "role": role, **told}
