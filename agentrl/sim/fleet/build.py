"""From a sim recipe to the models' own words. The world puts them together."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.recipe.sim import SimRecipe
from agentrl.records import Lane
from agentrl.scheduler.policy import Policy
from agentrl.sim.fleet.constants import Efficiency
from agentrl.sim.fleet.host import HostPlan, isolated, pooled
from agentrl.sim.fleet.measured import Measured
from agentrl.sim.fleet.ops import Plans
from agentrl.sim.fleet.roofline import Costs, Roofline, Serving
from agentrl.sim.fleet.trace import Again, Trace
from agentrl.sim.fleet.workload import PRESETS, Shape, Spread, ToolKind, Workload


def serving_of(recipe: SimRecipe) -> Serving:
    fleet = recipe.fleet
    return Serving(
        topology=fleet.topology,
        kv_dtype=fleet.kv_dtype,
        weights_dtype=fleet.weights_dtype,
        mtp=fleet.mtp,
        offload=fleet.offload,
        slots=fleet.slots,
        gpus=fleet.gpus_per_host,
        efficiency=Efficiency(derate=fleet.derate, flops=fleet.flops_share),
    )


def costs_of(recipe: SimRecipe) -> Costs:
    """Of one engine: measured, or from the model's and the GPU's figures."""
    measured = recipe.fleet.measured
    return Measured(measured) if measured is not None else Roofline(serving_of(recipe))


def host_plan_of(recipe: SimRecipe) -> HostPlan:
    fleet = recipe.fleet
    if fleet.lanes == "pooled":
        caps = {Lane(name): cap for name, cap in fleet.lane_caps.items()}
        return pooled(fleet.cpus_per_host, fleet.serving_cpus, greed=fleet.greed, caps=caps)
    return isolated(fleet.cpus_per_host, fleet.serving_cpus, package_cap=fleet.package_cap)


def shape_of(recipe: SimRecipe) -> Shape:
    """The preset with the recipe's factors applied."""
    shape, by = PRESETS[recipe.workload.preset], recipe.workload.overrides

    def scaled(spread: Spread, factor: float) -> Spread:
        return msgspec.structs.replace(spread, median=spread.median * factor)

    def tool(kind: ToolKind) -> ToolKind:
        return msgspec.structs.replace(
            kind, cpu_s=scaled(kind.cpu_s, by.tool_cpu), wait_s=scaled(kind.wait_s, by.tool_wait)
        )

    return msgspec.structs.replace(
        shape,
        turns=scaled(shape.turns, by.turns),
        reply=scaled(shape.reply, by.reply),
        observed=scaled(shape.observed, by.observed),
        difficulty=shape.difficulty * by.difficulty,
        tools=tuple(tool(kind) for kind in shape.tools),
        reset=tool(shape.reset),
        verify=tool(shape.verify),
        cleanup=tool(shape.cleanup),
    )


def plans_of(recipe: SimRecipe, seed: int) -> Plans:
    """DataError where the recipe's trace cannot be read."""
    if recipe.workload.trace:
        return Again(Trace.load(Path(recipe.workload.trace)), seed)
    return Workload(shape_of(recipe), seed)


def policy_of(recipe: SimRecipe) -> Policy:
    policy = recipe.policy
    return Policy(
        steps=recipe.steps,
        groups=policy.groups,
        siblings=policy.siblings,
        spare=policy.spare,
        window_groups=recipe.window_groups,
        window_attempts=recipe.window_attempts,
        bound=policy.K,
        auto=policy.window_groups == "auto",
        retries=policy.retries,
        attempt_timeout_s=policy.attempt_timeout_s,
        stall_s=policy.stall_s,
        order=recipe.publish.order,
        max_unavailable=recipe.publish.max_unavailable,
        in_flight=recipe.publish.in_flight,
        finish_timeout_s=recipe.publish.finish_timeout_s,
        move_margin=policy.move_margin,
        when_stale=policy.when_stale,
        mode=policy.mode,
        round_groups=policy.round_groups,
        admission=policy.admission,
    )
