"""What the engine model predicts before anything is fitted: tokens per second over batch, context and topology.

python -m agentrl.sim.fleet.throughput
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.records import Record
from agentrl.sim.fleet.roofline import Roofline, Serving, Topology, Work

PUBLISHED_TOKENS_MIN_GPU = 39_400.0
"""Output tokens per minute and GPU, 2,048 synthetic trajectories on 32 GPUs, until 90 % were done (public: the post
"In agentic RL, faster tokens are not enough")."""


class Point(Record):
    """One engine in steady decoding, nothing prefilling. running: sequences of the whole engine; context: mean."""

    topology: Topology
    running: int
    context: int
    step_s: float
    tokens_s: float  # of the engine
    tokens_min_gpu: float
    kv_share: float  # of the pool that these sequences fill; above 1 they do not fit


def point(serving: Serving, running: int, context: int) -> Point:
    costs = Roofline(serving)
    each, rest = divmod(running, costs.ranks)
    works = []
    for rank in range(costs.ranks):
        here = each + (rank < rest)
        works.append(Work(running=here, context=float(here * context)))
    step_s, _ = costs.step(works, 1.0)
    tokens_s = running * costs.accepted / step_s
    return Point(
        topology=serving.topology,
        running=running,
        context=context,
        step_s=step_s,
        tokens_s=tokens_s,
        tokens_min_gpu=60 * tokens_s / serving.gpus,
        kv_share=running * context / (costs.pool_tokens * costs.ranks),
    )


def table(
    base: Serving,
    batches: Sequence[int] = (1, 32, 128, 256, 512),
    contexts: Sequence[int] = (4_096, 16_384, 32_768),
) -> list[Point]:
    """Both topologies at every batch and context, all else as in `base`."""
    topologies: tuple[Topology, ...] = ("tp8", "dp8ep8")
    variants = [_with(base, topology) for topology in topologies]
    return [point(serving, b, c) for serving in variants for b in batches for c in contexts]


def _with(base: Serving, topology: Topology) -> Serving:
    return Serving(**{name: getattr(base, name) for name in base.__struct_fields__} | {"topology": topology})


def show(points: Sequence[Point]) -> str:
    lines = [f"{'topology':8} {'running':>7} {'context':>7} {'step ms':>8} {'tok/s':>8} {'tok/min/GPU':>11} {'KV':>6}"]
    lines += [
        f"{p.topology:8} {p.running:7d} {p.context:7d} {1e3 * p.step_s:8.2f} {p.tokens_s:8.0f} "
        f"{p.tokens_min_gpu:11.0f} {p.kv_share:6.1%}"
        for p in points
    ]
    return "\n".join(lines)


def main() -> None:
    for mtp in (0, 3):
        sys.stdout.write(f"drafted tokens {mtp}, nothing fitted\n{show(table(Serving(mtp=mtp)))}\n\n")
    at = point(Serving(), 512, 12_000)
    sys.stdout.write(
        f"2,048 offered on 4 engines, 12k tokens each, all decoding: {at.tokens_min_gpu:.0f} tok/min/GPU predicted, "
        f"{PUBLISHED_TOKENS_MIN_GPU:.0f} published ({at.tokens_min_gpu / PUBLISHED_TOKENS_MIN_GPU:.1f} times)\n"
    )


if __name__ == "__main__":
    main()
