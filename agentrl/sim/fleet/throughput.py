"""What the engine model predicts before anything is fitted: tokens per second over batch, context and topology.

python -m agentrl.sim.fleet.throughput
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from random import Random

import msgspec

from agentrl.records import Record
from agentrl.sim import clock
from agentrl.sim.fleet.engine import EngineModel
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
    variants = [msgspec.structs.replace(base, topology=topology) for topology in topologies]
    return [point(serving, b, c) for serving in variants for b in batches for c in contexts]


def show(points: Sequence[Point]) -> str:
    lines = [f"{'topology':8} {'running':>7} {'context':>7} {'step ms':>8} {'tok/s':>8} {'tok/min/GPU':>11} {'KV':>6}"]
    lines += [
        f"{p.topology:8} {p.running:7d} {p.context:7d} {1e3 * p.step_s:8.2f} {p.tokens_s:8.0f} "
        f"{p.tokens_min_gpu:11.0f} {p.kv_share:6.1%}"
        for p in points
    ]
    return "\n".join(lines)


async def _window(serving: Serving, requests: int, prompt: int, reply: int, share: float, seed: int) -> float:
    loop, rng = asyncio.get_running_loop(), Random(f"{seed}/synthetic")
    engine = EngineModel("e", Roofline(serving))
    ranks, done = len(engine.ranks), asyncio.Event()
    left = int(share * requests)

    async def one(name: int) -> None:
        nonlocal left
        length = max(1, int(reply * rng.lognormvariate(-0.18, 0.6)))  # mean `reply`
        await engine.generate(name, name, rank=name % ranks, prompt_tokens=prompt, new_tokens=length)
        left -= 1
        if left == 0:
            done.set()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(name)) for name in range(requests)]
        await done.wait()
        rate = 60 * engine.generated_tokens / loop.time() / serving.gpus
        for task in tasks:
            task.cancel()
    return rate


def synthetic(serving: Serving, *, requests: int, prompt: int, reply: int, share: float = 0.9, seed: int = 0) -> float:
    """Output tokens per minute and GPU of one engine that is offered all requests at once, until `share` are done.

    Prompts have nothing in common; replies are lognormal with mean `reply`. Not from within a running loop.
    """
    return clock.run(_window(serving, requests, prompt, reply, share, seed))


class Fit(Record):
    """What two assumed constants would have to be for two published figures. gain: of drafting, at that `flops`."""

    flops: float
    derate: float
    gain: float


def fit(base: Serving, *, running: int = 512, context: int = 12_000, gain: float = 1.179) -> Fit:
    """`flops` so that 3 drafted tokens gain 17.9 % (public), then `derate` so that the engine makes 39.4k (public).

    Steady decoding; nothing else is looked at. Fewer FLOPs make verifying drafts dearer, so the gain falls with them.
    """

    def rate(flops: float, mtp: int) -> float:
        efficiency = msgspec.structs.replace(base.efficiency, flops=flops, derate=1.0)
        serving = msgspec.structs.replace(base, efficiency=efficiency, mtp=mtp)
        return point(serving, running, context).tokens_min_gpu

    low, high = 0.01, base.efficiency.flops
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if rate(middle, 3) / rate(middle, 0) < gain else (low, middle)
    drafted = rate(low, 3)
    return Fit(flops=low, derate=drafted / PUBLISHED_TOKENS_MIN_GPU, gain=drafted / rate(low, 0))


def main() -> None:
    say = sys.stdout.write
    for mtp in (0, 3):
        say(f"drafted tokens {mtp}, nothing fitted\n{show(table(Serving(mtp=mtp)))}\n\n")
    steady = point(Serving(), 512, 12_000).tokens_min_gpu
    offered = synthetic(Serving(), requests=512, prompt=8_192, reply=2_048)
    say(f"published, 2,048 offered: {PUBLISHED_TOKENS_MIN_GPU:.0f} tok/min/GPU. Predicted, nothing fitted:\n")
    say(f"  512 decoding at 12k tokens          {steady:.0f} ({steady / PUBLISHED_TOKENS_MIN_GPU:.1f} times)\n")
    say(f"  512 of 8k + 2k offered, 90 % done   {offered:.0f} ({offered / PUBLISHED_TOKENS_MIN_GPU:.1f} times)\n")
    fitted = fit(Serving())
    say(
        f"to meet it and +17.9 % of 3 drafted tokens: flops {Serving().efficiency.flops} -> {fitted.flops:.3f}, "
        f"derate 1.0 -> {fitted.derate:.2f}\n"
    )


if __name__ == "__main__":
    main()
