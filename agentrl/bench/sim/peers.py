"""Our policy beside those of peer systems in one world: same tasks, engines, lanes, trainer, publication and bound on
conversations in flight. Each at its best depth, chosen on a seed that is not reported."""

from __future__ import annotations

from statistics import mean
from typing import Any, NamedTuple

import msgspec

from agentrl.bench.fleet import Recorder, simulate
from agentrl.bench.sim.policies import PEERS, Peer
from agentrl.bench.sim.sheet import Sheet, Table, average, plus_minus
from agentrl.recipe.sim import SimRecipe
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim.fleet.build import plans_of, serving_of
from agentrl.sim.fleet.throughput import point
from agentrl.wiring.fleet import Options

DEPTHS = (2, 4, 8)  # windows tried, in batches
TRIAL_SEED = 1_000
_FREE = 1 << 20


class Choice(NamedTuple):
    """bound: K, 0 where nothing expires."""

    peer: Peer
    bound: int
    depth: int
    runs: list[dict[str, Any]]


def recipe_of(recipe: SimRecipe, peer: Peer, depth: int) -> SimRecipe:
    """A peer without our window gets one without end; its own rule is in `peer.make`."""
    replace, policy = msgspec.structs.replace, recipe.policy
    sync = peer.mode == "sync"
    changed = replace(
        policy,
        window_groups=policy.groups if sync else depth if peer.windowed else _FREE,
        window_attempts=recipe.window_attempts,
        round_groups=policy.groups if sync else 0,
        mode=peer.mode,
        admission=peer.admission,
    )
    return replace(recipe, policy=changed)


def play(recipe: SimRecipe, peer: Peer, depth: int, seed: int) -> dict[str, Any]:
    recorder = Recorder()
    changed = recipe_of(recipe, peer, depth)

    def make(policy: Policy) -> Core:
        return peer.make(policy, depth)

    finish = simulate(changed, seed, Options(), recorder, watch=recorder.watch, make_core=make)
    assert recorder.fleet is not None
    result = recorder.result(recorder.fleet.core)
    return {
        "outcome": finish.outcome,
        **result,
        "returned_ratio": recorder.returned_ratio(plans_of(recipe, seed)),
        "to_floor": result["mean_s"] / floor_s(recipe, result["sampled_per_batch"]),
    }


def floor_s(recipe: SimRecipe, sampled: float) -> float:
    """Seconds in which the fleet could sample a batch's tokens if every slot decoded all the time."""
    serving = serving_of(recipe)
    context = plans_context(recipe)
    best = max(point(serving, running, context).tokens_s for running in (64, 128, 256, 512, 1024))
    return sampled / (best * recipe.fleet.hosts)


def plans_context(recipe: SimRecipe) -> int:
    """Tokens a conversation holds on average over its life, about: opening and half of the stream."""
    plans = [plans_of(recipe, recipe.seed).plan(f"t{n}", 0) for n in range(64)]
    return round(mean(plan.opening + plan.stream / 2 for plan in plans))


def run(recipe: SimRecipe, seeds: int) -> Sheet:
    bounds = (recipe.policy.K, recipe.policy.K // 2)
    chosen = [_choose(recipe, peer, 0 if not peer.bound else bounds[0], seeds) for peer in PEERS]
    chosen += [_choose(recipe, peer, bounds[1], seeds) for peer in PEERS if peer.bound and peer.mode == "async"]
    return Sheet(
        arm="peers",
        recipe=recipe.name,
        seeds=seeds,
        tables=(_table(recipe, chosen),),
        notes=(
            f"at most {recipe.window_attempts} conversations at once for all; trainer step {recipe.trainer.step_s:g} s,"
            f" whole weights, {recipe.publish.order}, {recipe.publish.in_flight}",
            f"depth: the best of {', '.join(map(str, DEPTHS))} batches on another seed",
            "length: tokens of trained trajectories over those of all that were opened in the first half of the run;"
            " below 1 favours short work. floor: every slot of the fleet decoding all the time",
            "peers are described from their public behaviour, on our engines, routing and lanes; they are not their"
            " code. What is aborted loses its sandbox: its commands are played again.",
        ),
        data={
            "policies": [
                {"name": c.peer.name, "ours": c.peer.ours, "K": c.bound, "depth_groups": c.depth, "runs": c.runs}
                for c in chosen
            ]
        },
    )


def _choose(recipe: SimRecipe, peer: Peer, bound: int, seeds: int) -> Choice:
    """The peer at its best depth, then its reported runs."""
    policy = msgspec.structs.replace(recipe.policy, K=bound or _FREE)
    bounded = msgspec.structs.replace(recipe, policy=policy)
    batch = recipe.policy.groups
    depths = [d * batch for d in DEPTHS] if peer.mode == "async" else [batch]
    trials = {depth: play(bounded, peer, depth, TRIAL_SEED)["mean_s"] for depth in depths if len(depths) > 1}
    best = min(depths, key=lambda depth: trials.get(depth, 0.0))
    return Choice(peer, bound, best, [play(bounded, peer, best, recipe.seed + seed) for seed in range(seeds)])


def _table(recipe: SimRecipe, chosen: list[Choice]) -> Table:
    rows = tuple(
        (
            c.peer.name,
            f"{c.bound or '-'}",
            f"{c.depth / recipe.policy.groups:g}",
            plus_minus([run["mean_s"] for run in c.runs]),
            f"{average(c.runs, 'to_floor'):.1f}",
            f"{average(c.runs, 'returned_ratio'):.3f}",
            f"{average(c.runs, 'age_mean'):.2f}",
            f"{max(run['age_max'] for run in c.runs)}",
            f"{mean(sum(run['dropped'].values()) for run in c.runs):.1f}",
            f"{average(c.runs, 'wasted_share'):.1%}",
        )
        for c in chosen
    )
    columns = ("", ">K", ">depth", ">s a batch", ">over floor", ">length", ">mean age", ">max age", ">drops", ">wasted")
    return Table(title=f"policies (simulated), {recipe.name}", columns=columns, rows=rows)
