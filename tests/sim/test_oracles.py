"""The models against answers that are known without them: queueing theory, order statistics, Little's law."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from agentrl.records import GroupId, TaskId, TrajectoryFacts, Version
from agentrl.scheduler import commands as order
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim.clock import run
from agentrl.sim.fleet.engine import EngineModel
from agentrl.sim.fleet.roofline import Flat

# --- a closed network: N conversations decode on S slots, then use a tool ------------------------------------------

SLOTS, DECODE_S, TOOL_S = 64, 2.0, 8.0
TOKENS = 100  # of one turn, on average


def waiting(k: int) -> float:
    """Log of the product of the service rates with 1 to k conversations in decode, in units of one slot's."""
    return math.lgamma(min(k, SLOTS) + 1) + max(0, k - SLOTS) * math.log(SLOTS)


def finite_source(clients: int) -> tuple[float, float]:
    """Exact (utilisation, decode seconds of a turn) of the machine-repair model. Insensitive under sharing."""
    ratio, peak = math.log(DECODE_S / TOOL_S), math.lgamma(clients + 1)
    logs = [peak - math.lgamma(clients - k + 1) + k * ratio - waiting(k) for k in range(clients + 1)]
    weights = [math.exp(log - max(logs)) for log in logs]
    total = sum(weights)
    busy = sum(w * min(k, SLOTS) for k, w in enumerate(weights)) / total
    present = sum(w * k for k, w in enumerate(weights)) / total
    return busy / SLOTS, present / busy * DECODE_S


async def closed_network(clients: int, seed: int, draw: Callable[[random.Random], float]) -> tuple[float, float]:
    loop, warm, until = asyncio.get_running_loop(), 60.0, 460.0
    engine = EngineModel("e", Flat(SLOTS, token_s=DECODE_S / TOKENS))
    rng = random.Random(seed)
    spent: list[float] = []

    async def client(name: int) -> None:
        await asyncio.sleep(rng.expovariate(1 / TOOL_S))
        while loop.time() < until:
            tokens = max(1, round(TOKENS * draw(rng)))
            reply = await engine.generate(name, name, rank=0, prompt_tokens=10, new_tokens=tokens)
            spent.append(reply.decode_s)
            await asyncio.sleep(rng.expovariate(1 / TOOL_S))

    async with asyncio.TaskGroup() as group:
        for name in range(clients):
            group.create_task(client(name))
        await asyncio.sleep(warm)
        before = engine.generated_tokens
        await asyncio.sleep(until - warm)
        sampled = engine.generated_tokens - before
    return sampled * DECODE_S / TOKENS / SLOTS / (until - warm), sum(spent) / len(spent)


@pytest.mark.parametrize(("clients", "table"), [(256, 0.800), (288, 0.896), (320, 0.973), (352, 0.999)])
def test_utilisation_of_a_finite_source(clients: int, table: float) -> None:
    utilisation, decode_s = finite_source(clients)
    assert utilisation == pytest.approx(table, abs=0.0006)
    measured, spent = run(closed_network(clients, 1, lambda rng: rng.expovariate(1.0)))
    assert measured == pytest.approx(utilisation, abs=0.015)
    assert spent == pytest.approx(decode_s, rel=0.05)


def test_sharing_is_insensitive_to_the_distribution_of_work() -> None:
    measured, spent = run(closed_network(320, 2, lambda rng: 1.0))
    utilisation, decode_s = finite_source(320)
    assert measured == pytest.approx(utilisation, abs=0.015)
    assert spent == pytest.approx(decode_s, rel=0.05)


# --- order statistics: when the first B of G groups of n are whole ---------------------------------------------------

Draw = Callable[[np.random.Generator, tuple[int, ...]], "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]


LAWS: dict[str, Draw] = {
    "lognormal 0.5": lambda rng, size: rng.lognormal(-0.125, 0.5, size),
    "lognormal 1": lambda rng, size: rng.lognormal(-0.5, 1.0, size),
    "exponential": lambda rng, size: rng.exponential(1.0, size),
    "Pareto 1.5": lambda rng, size: np.minimum(10.0, (rng.pareto(1.5, size) + 1) / 3.0),  # mean 1 but for the cap
}


def first_groups(draw: Draw, n: int, batch: int, offered: int, rounds: int = 1_500) -> tuple[float, float]:
    """(mean time until `batch` of `offered` groups of n are whole, mean length kept), both over the mean length."""
    rng = np.random.default_rng(0)
    lengths = draw(rng, (rounds, offered, n))
    whole = lengths.max(axis=2)
    chosen = np.argsort(whole, axis=1)[:, :batch]
    kept = np.take_along_axis(lengths, chosen[:, :, None], axis=1)
    return float(np.sort(whole, axis=1)[:, batch - 1].mean() / lengths.mean()), float(kept.mean() / lengths.mean())


@pytest.mark.parametrize(
    ("law", "n", "batch", "tail", "barrier", "gains", "kept"),
    [
        ("lognormal 0.5", 32, 8, 2.56, 3.69, (0.21, 0.28, 0.35, 0.44), 0.96),
        ("lognormal 1", 32, 8, 5.49, 11.20, (0.41, 0.51, 0.60, 0.70), 0.87),
        ("exponential", 32, 8, 4.05, 6.15, (0.23, 0.31, 0.39, 0.49), 0.92),
        ("Pareto 1.5", 32, 8, 5.94, 10.82, (0.20, 0.39, 0.56, 0.71), 0.85),
        ("lognormal 1", 8, 32, 3.08, 11.17, (0.64, 0.72, 0.78, 0.85), 0.71),
    ],
)
def test_surplus_shortens_the_wait_and_favours_short_work(
    law: str, n: int, batch: int, tail: float, barrier: float, gains: tuple[float, ...], kept: float
) -> None:
    draw = LAWS[law]
    assert first_groups(draw, n, 1, 1, rounds=40_000)[0] == pytest.approx(tail, rel=0.02)
    alone, _ = first_groups(draw, n, batch, batch)
    assert alone == pytest.approx(barrier, rel=0.03)
    for surplus, gain in zip((1.25, 1.5, 2.0, 4.0), gains, strict=True):
        time, ratio = first_groups(draw, n, batch, round(surplus * batch))
        assert 1 - time / alone == pytest.approx(gain, abs=0.02)
        if surplus == 2.0:
            assert ratio == pytest.approx(kept, abs=0.015)


def test_the_approximation_by_quantiles() -> None:
    """E[M_(B:G)] is near the quantile of order (B / (G + 1))^(1/n)."""
    for offered in (16, 32):
        level = (8 / (offered + 1)) ** (1 / 32)
        assert first_groups(LAWS["exponential"], 32, 8, offered)[0] == pytest.approx(-math.log(1 - level), rel=0.03)


def test_the_engine_gives_the_same_order_statistics() -> None:
    """512 requests of exponential length on an engine without limits: the first 8 whole groups of 16."""

    async def main(seed: int) -> float:
        engine, loop = EngineModel("e", Flat(1 << 20, token_s=1e-3)), asyncio.get_running_loop()
        rng = random.Random(seed)
        whole: list[float] = []

        async def group(name: int) -> None:
            lengths = [max(1, round(1_000 * rng.expovariate(1.0))) for _ in range(32)]
            calls = [
                engine.generate((name, i), name, rank=0, prompt_tokens=10, new_tokens=n) for i, n in enumerate(lengths)
            ]
            await asyncio.gather(*calls)
            whole.append(loop.time())

        async with asyncio.TaskGroup() as groups:
            for name in range(16):
                groups.create_task(group(name))
        return whole[7]

    mean = sum(run(main(seed)) for seed in range(24)) / 24
    assert mean == pytest.approx(6.15 * (1 - 0.39), rel=0.05)


# --- staleness ------------------------------------------------------------------------------------------------------


class Machine:
    """The core alone in a kind world: lengths are drawn, the trainer takes `train_s`, new weights are live at once."""

    def __init__(self, policy: Policy, draw: Callable[[random.Random], float], *, train_s: float, seed: int) -> None:
        self.core, self.rng, self.draw, self.train_s = Core(policy), random.Random(seed), draw, train_s
        self.now, self.count, self.tasks = 0.0, 0, 0
        self.heap: list[tuple[float, int, news.Event]] = []
        self.begun: dict[GroupId, Version] = {}
        self.elapsed: list[int] = []  # versions made from a group's start to the cut that takes it

    def later(self, after: float, event: news.Event) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + after, self.count, event))

    def run(self) -> list[int]:
        self.later(0.0, news.EngineUp(engine="e", epoch=0, version=Version(0), ranks=1, slots=10**6, kv_tokens=10**9))
        self.later(0.0, news.SandboxHostUp(host="h", capacity=10**6))
        self.later(0.0, news.TrainerReady(version=Version(0)))
        while self.core.finished is None:
            self.now, _, event = heapq.heappop(self.heap)
            for command in self.core.handle(event, self.now):
                self.obey(command)
        return self.elapsed

    def obey(self, command: order.Command) -> None:
        core = self.core
        match command:
            case order.PullTasks(count=count):
                for _ in range(count):
                    self.tasks += 1
                    self.later(0.0, news.TaskOffered(task=TaskId(f"t{self.tasks}")))
            case order.StartAttempt(attempt=attempt):
                self.begun.setdefault(attempt.group, core.version)
                facts = TrajectoryFacts(
                    attempt=attempt, reward=0.0, tokens=1, generated=1, versions=((core.version, 1),)
                )
                self.later(self.draw(self.rng), news.AttemptEnded(facts=facts))
            case order.TrainOn():
                self.elapsed += [core.version - self.begun[proof.group] for proof in command.proofs]
                made = Version(core.version + 1)
                self.later(self.train_s, news.StepFinished(batch=command.batch, version=made, seconds=self.train_s))
                self.later(self.train_s, news.TrainerReady(version=made))
            case order.StageWeights(engine=engine, epoch=epoch, version=version):
                self.later(0.0, news.EngineStaged(engine=engine, epoch=epoch, version=version))
            case order.SwapWeights(engine=engine, epoch=epoch, version=version):
                self.later(0.0, news.EngineLoaded(engine=engine, epoch=epoch, version=version))
            case _:
                pass


def policy(*, groups: int, siblings: int, window: int, attempts: int = 10**6, steps: int = 500) -> Policy:
    return Policy(
        steps=steps,
        groups=groups,
        siblings=siblings,
        window_groups=window,
        window_attempts=attempts,
        bound=10**6,
        attempt_timeout_s=1e9,
        stall_s=1e9,
    )


@pytest.mark.parametrize("law", ["exponential", "lognormal", "uniform"])
@pytest.mark.parametrize(("groups", "window"), [(2, 2), (2, 4), (2, 8), (3, 8)])
def test_versions_that_pass_while_a_group_is_in_flight(law: str, groups: int, window: int) -> None:
    """Little: W places, B of them freed by every version: W/B, the version of its own batch included."""
    draw: Callable[[random.Random], float] = {
        "exponential": lambda rng: rng.expovariate(1.0),
        "lognormal": lambda rng: rng.lognormvariate(-0.5, 1.0),
        "uniform": lambda rng: rng.uniform(0.5, 1.5),
    }[law]
    machine = Machine(policy(groups=groups, siblings=4, window=window), draw, train_s=0.0, seed=3)
    elapsed = machine.run()
    assert sum(elapsed) / len(elapsed) + 1 == pytest.approx(window / groups, rel=0.025)


def closed_form(slots: int, tail: float, batch: int, ratio: float, queue: float = 1.0) -> float:
    """Mean staleness (public: Applied Compute, "Staleness in fully async RL"). ratio: rollout rate over train rate;
    slots and batch in samples; queue: capacity in batches."""
    if ratio < 1:
        return slots * tail / batch + ratio
    return slots * tail / (ratio * batch) + (2 * queue + ratio - 1) / (2 * ratio)


@pytest.mark.parametrize(("siblings", "tail", "off"), [(1, 1.0, 0.06), (4, 25 / 12, 0.3)])
@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_staleness_where_rollout_is_the_limit(siblings: int, tail: float, off: float, ratio: float) -> None:
    """With siblings, slots are refilled one by one, so a group's members start apart: the form is only near."""
    slots, groups = 192, 64 // siblings
    core_policy = policy(groups=groups, siblings=siblings, window=10**5, attempts=slots, steps=300)
    machine = Machine(core_policy, lambda rng: rng.expovariate(1.0), train_s=ratio * 64 / slots, seed=5)
    elapsed = machine.run()
    settled = elapsed[groups * 20 :]
    assert sum(settled) / len(settled) == pytest.approx(closed_form(slots, tail, 64, ratio), abs=off)


@pytest.mark.parametrize(("ratio", "queue"), [(1.5, 1), (2.0, 1), (2.0, 2)])
def test_staleness_where_training_is_the_limit(ratio: float, queue: int) -> None:
    """Slots that refill at once, a bounded queue that drops its oldest, a trainer that always finds a batch."""
    slots, batch, rng = 192, 64, random.Random(6)
    period = ratio * batch / slots  # lengths have mean 1
    running = [(rng.expovariate(1.0), 0) for _ in range(slots)]
    heapq.heapify(running)
    ready: deque[int] = deque(maxlen=queue * batch)
    ages: list[int] = []
    for version in range(1, 400):
        while running[0][0] <= version * period:
            end, made_by = heapq.heappop(running)
            ready.append(made_by)
            heapq.heappush(running, (end + rng.expovariate(1.0), int(end / period)))
        if len(ready) >= batch:
            ages += [version - ready.popleft() for _ in range(batch)]
    settled = ages[batch * 20 :]
    assert sum(settled) / len(settled) == pytest.approx(closed_form(slots, 1.0, batch, ratio, queue), abs=0.12)
