"""How fast the fleet serves synthetic conversations, and what each choice of the serving stack changes.

All conversations are offered at once, through the unchanged core; tools are a constant delay. The window is until 90 %
of them have ended, so that the tail of a finite load is not counted as serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import msgspec

from agentrl.bench.fleet import simulate
from agentrl.bench.sim.sheet import Claim, Sheet, Table, average
from agentrl.recipe.sim import SimRecipe
from agentrl.records import AttemptId, Lane, Turn
from agentrl.runtime.loop import Listener
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.sim.fleet.build import plans_of
from agentrl.sim.fleet.ops import AttemptPlan, Op, Plans, TurnPlan
from agentrl.wiring.fleet import Fleet, Options

TOKENS_MIN_GPU = 39_400.0  # public: at 2,048, DP8 and EP8
THINK_S = 14.0  # fitted to it: the synthetic conversations' time between turns, which is not published
WINDOW = 0.9  # public
OFFERED = 1_024
_ROOMY = 1 << 16


class Synthetic(Plans):
    """The preset's lengths; every operation is a delay without CPU work, sandboxes cost nothing."""

    def __init__(self, plans: Plans, think_s: float) -> None:
        self._plans = plans
        self._delay = Op(Lane.COMMAND, 0.0, think_s)

    def plan(self, group: str, member: int) -> AttemptPlan:
        plan, free = self._plans.plan(group, member), Op(Lane.RESET, 0.0)
        turns = tuple(TurnPlan(t.new_tokens, t.observed_tokens, t.op and self._delay) for t in plan.turns)
        return plan._replace(turns=turns, reset=free, verify=free, cleanup=free)


class Meter(Listener):
    """Every turn with its end, every conversation's end."""

    def __init__(self) -> None:
        self.turns: list[tuple[float, Turn]] = []
        self.ends: list[float] = []
        self.fleet: Fleet | None = None

    def watch(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def turn(self, attempt: AttemptId, turn: Turn) -> None:
        self.turns.append((turn.began_s + turn.engine_s, turn))

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        if isinstance(event, news.AttemptEnded):
            self.ends.append(now)

    def result(self, gpus: int) -> dict[str, float]:
        assert self.fleet is not None
        until = sorted(self.ends)[max(0, round(WINDOW * len(self.ends)) - 1)]
        turns = [turn for ended, turn in self.turns if ended <= until]
        sampled = sum(turn.end - turn.start for turn in turns)
        return {
            "window_s": until,
            "tokens_min_gpu": 60 * sampled / until / gpus,
            "request_tokens_s": median((turn.end - turn.start) / turn.engine_s for turn in turns),
            "reuse": sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
            "engine_s": mean(turn.engine_s for turn in turns),
            "retractions": sum(rank.retractions for e in self.fleet.engines.values() for rank in e.ranks),
        }


def offer(recipe: SimRecipe, offered: int, seed: int, *, per_request: bool = False, **fleet: Any) -> dict[str, float]:
    """One engine fleet, `offered` conversations at once. fleet: what differs from the recipe's."""
    groups = max(1, offered // recipe.policy.siblings)
    policy = msgspec.structs.replace(
        recipe.policy, groups=groups, window_groups=groups, window_attempts=0, admission="fifo", stall_s=1e6
    )
    roomy = msgspec.structs.replace(
        recipe.fleet, cpus_per_host=_ROOMY, sandboxes_per_host=_ROOMY, lanes="isolated", **fleet
    )
    changed = msgspec.structs.replace(recipe, steps=1, policy=policy, fleet=roomy)
    meter = Meter()
    simulate(
        changed,
        recipe.seed + seed,
        Options(fixed_weights=True, per_request=per_request),
        meter,
        watch=meter.watch,
        plans=Synthetic(plans_of(recipe, recipe.seed + seed), THINK_S),
    )
    return meter.result(recipe.fleet.hosts * recipe.fleet.gpus_per_host)


_POINTS: dict[str, dict[str, Any]] = {
    "dp8ep8": {"topology": "dp8ep8"},
    "dp8ep8, per-request routing": {"topology": "dp8ep8", "per_request": True},
    "dp8ep8, no drafts": {"topology": "dp8ep8", "mtp": 0},
    "dp8ep8, offload": {"topology": "dp8ep8", "offload": True},
    "dp8ep8, BF16 KV": {"topology": "dp8ep8", "kv_dtype": "bf16"},
    "tp8": {"topology": "tp8"},
    "tp8, per-request routing": {"topology": "tp8", "per_request": True},
    "tp8, no drafts": {"topology": "tp8", "mtp": 0},
    "tp8, offload": {"topology": "tp8", "offload": True},
    "tp8, BF16 KV": {"topology": "tp8", "kv_dtype": "bf16"},
}


def run(recipe: SimRecipe, seeds: int, offered: int = OFFERED) -> Sheet:
    points = [(name, offered, change) for name, change in _POINTS.items()]
    points += [(name, 2 * offered, _POINTS[name]) for name in ("dp8ep8", "tp8")]
    measured = {
        (name, load): [offer(recipe, load, seed, **change) for seed in range(seeds)] for name, load, change in points
    }
    return Sheet(
        arm="serving",
        recipe=recipe.name,
        seeds=seeds,
        tables=(_table(measured),),
        claims=_claims(measured, offered),
        notes=(
            f"synthetic conversations with {THINK_S:g} s between turns, all offered at once; window until"
            f" {WINDOW:.0%} have ended; request: one turn's generation",
            "which topology each published comparison was made on is not known: dp8ep8 is compared, except for KV"
            " precision, which can only matter where memory is short (tp8)",
        ),
        data={"points": [{"point": name, "offered": load, "runs": runs} for (name, load), runs in measured.items()]},
    )


Measured = dict[tuple[str, int], list[dict[str, float]]]


def _of(measured: Measured, name: str, load: int, key: str) -> float:
    return average(measured[name, load], key)


def _table(measured: Measured) -> Table:
    rows = []
    for name, load in measured:
        rows.append(
            (
                name,
                f"{load:,}",
                f"{_of(measured, name, load, 'tokens_min_gpu'):,.0f}",
                f"{_of(measured, name, load, 'request_tokens_s'):.1f}",
                f"{_of(measured, name, load, 'reuse'):.0%}",
                f"{_of(measured, name, load, 'engine_s'):.1f}",
                f"{_of(measured, name, load, 'window_s'):.0f}",
                f"{_of(measured, name, load, 'retractions'):.0f}",
            )
        )
    columns = (
        "",
        ">offered",
        ">tok/min/GPU",
        ">median request tok/s",
        ">reuse",
        ">s a turn",
        ">window s",
        ">retracted",
    )
    return Table(title="serving (simulated)", columns=columns, rows=tuple(rows))


def _claims(measured: Measured, offered: int) -> tuple[Claim, ...]:
    def gain(name: str, than: str, key: str = "tokens_min_gpu", load: int = offered) -> float:
        return _of(measured, name, load, key) / _of(measured, than, load, key) - 1

    best = _of(measured, "dp8ep8", 2 * offered, "tokens_min_gpu")
    return (
        Claim(
            what=f"output tok/min/GPU at {2 * offered:,}", published=TOKENS_MIN_GPU, simulated=best, fitted="THINK_S"
        ),
        Claim(
            what="sticky routing, throughput",
            published=0.171,
            simulated=gain("dp8ep8", "dp8ep8, per-request routing"),
            unit="%",
        ),
        Claim(what="FP8 KV, throughput (tp8)", published=0.557, simulated=gain("tp8", "tp8, BF16 KV"), unit="%"),
        Claim(
            what="3 drafted tokens, output", published=0.179, simulated=gain("dp8ep8", "dp8ep8, no drafts"), unit="%"
        ),
        Claim(
            what="3 drafted tokens, median request",
            published=0.665,
            simulated=gain("dp8ep8", "dp8ep8, no drafts", "request_tokens_s"),
            unit="%",
        ),
        Claim(
            what="offload (published -3.1 to -7.8 %)",
            published=-0.0545,
            simulated=gain("dp8ep8, offload", "dp8ep8"),
            unit="%",
        ),
        Claim(
            what=f"shared KV is better at {offered:,}",
            published=0,
            simulated=gain("tp8", "dp8ep8"),
            unit="%",
            bound=True,
        ),
        Claim(
            what=f"dp8ep8 is better at {2 * offered:,}",
            published=0,
            simulated=gain("dp8ep8", "tp8", load=2 * offered),
            unit="%",
            bound=True,
        ),
    )
