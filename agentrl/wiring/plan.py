"""What a recipe comes to before anything starts. Reads the recipe, the model folder and this machine only."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from agentrl.errors import UserError
from agentrl.recipe.check import Problem, check
from agentrl.recipe.schema import Recipe
from agentrl.records import Lane, Limits, Record
from agentrl.sandbox.cpusets import format_cpus
from agentrl.sandbox.daemon import plan_of
from agentrl.wiring.attach import RUNS
from agentrl.wiring.derive import model_path
from agentrl.wiring.kv import KvFit, kv_fit

MB = 1e6
_ADAM_COPIES = 3  # a checkpoint: the weights and two moments


class Window(Record):
    """Groups and conversations. versions_in_flight: W/B, how many versions pass on average while a group is open. auto:
    groups is what the run begins with, attempts the most that it may come to."""

    groups: int
    batch_groups: int
    surplus: int
    siblings: int
    spare: int
    attempts: int
    attempts_of_a_batch: int
    versions_in_flight: float
    bound: int  # K
    bound_wanted: int  # rule of thumb: K >= 2 W/B
    auto: bool = False


class Fleet(Record):
    """All engines together. slots: sequences decoded at once. kv_tokens: 0 where SGLang decides and nothing tells how
    much that is. kv_wanted: all conversations in flight at full length. kv: of this model, None where unknown."""

    engines: int
    ranks: int
    slots: int
    attached: bool
    context_tokens: int
    kv_tokens: int
    kv_wanted: int
    kv_of_rank: int
    kv_of_rank_wanted: int  # slots * context
    kv: KvFit | None = None


class Step(Record):
    """One optimizer step at most: every trajectory at full context."""

    steps: int
    trajectories: int
    tokens: int
    micro_batches: int
    last_version: int


class LanePlan(Record):
    lane: Lane
    cpus: str
    cap: int
    shared_with: tuple[Lane, ...]


class Machine(Record):
    """Bytes. sandboxes_memory: the limits of all conversations' sandboxes; they rarely use them."""

    cpus: int
    serving_cpus: str
    memory_total: int
    memory_available: int
    sandboxes: int
    sandboxes_memory: int
    model_bytes: int
    weights_disk: int
    checkpoints_disk: int
    disk_free: int


class Placed(Record):
    """One host of the inventory. engines: names. sandboxes: at most, 0 where it has none."""

    name: str
    address: str
    engines: tuple[str, ...]
    sandboxes: int


class Plan(Record):
    recipe: str
    works: bool
    problems: tuple[Problem, ...]
    window: Window
    fleet: Fleet
    step: Step
    lanes: tuple[LanePlan, ...]
    machine: Machine
    hosts: tuple[Placed, ...] = ()


def plan(recipe: Recipe) -> Plan:
    """Problems first, the fatal ones before the others; works: none is fatal."""
    problems = list(check(recipe))
    lanes, serving = _lanes(recipe, problems)
    machine = _machine(recipe, serving, problems)
    fleet = _fleet(recipe, machine.model_bytes)
    crowded = () if recipe.window.groups == "auto" else _fleet_problems(fleet)  # auto minds the caches
    problems += [*crowded, *_machine_problems(recipe, machine)]
    problems.sort(key=lambda problem: not problem.fatal)
    return Plan(
        recipe=recipe.name,
        works=not any(problem.fatal for problem in problems),
        problems=tuple(problems),
        window=_window(recipe),
        fleet=fleet,
        step=_step(recipe),
        lanes=lanes,
        machine=machine,
        hosts=tuple(_placed(recipe)),
    )


def _placed(recipe: Recipe) -> Iterator[Placed]:
    engine_hosts = [] if recipe.engines.attach else recipe.engine_hosts
    for host in recipe.hosts:
        yield Placed(
            name=host.name,
            address=host.address or host.name,
            engines=tuple(f"e{index}" for index, name in enumerate(engine_hosts) if name == host.name),
            sandboxes=recipe.sandbox.max_live if host.name in recipe.sandbox_hosts else 0,
        )


def _window(recipe: Recipe) -> Window:
    groups, batch = recipe.window_groups, recipe.batch
    return Window(
        groups=groups,
        batch_groups=batch.groups,
        surplus=groups - batch.groups,
        siblings=batch.siblings,
        spare=batch.spare,
        attempts=recipe.window_attempts,
        attempts_of_a_batch=batch.groups * (batch.siblings + batch.spare),
        versions_in_flight=groups / batch.groups,
        bound=recipe.freshness.K,
        bound_wanted=math.ceil(2 * groups / batch.groups),
        auto=recipe.window.groups == "auto",
    )


def _fleet(recipe: Recipe, model_bytes: int) -> Fleet:
    engines, context = recipe.engines, recipe.model.context_tokens
    ranks = engines.count * engines.ranks
    kv = None
    with contextlib.suppress(UserError):  # that there is no model is said already
        kv = kv_fit(recipe, model_path(recipe), model_bytes)
    of_rank = engines.kv_tokens or (kv.rank_tokens if kv else 0)
    return Fleet(
        engines=engines.count,
        ranks=engines.ranks,
        slots=ranks * engines.slots,
        attached=bool(engines.attach),
        context_tokens=context,
        kv_tokens=ranks * of_rank,
        kv_wanted=recipe.window_attempts * context,
        kv_of_rank=of_rank,
        kv_of_rank_wanted=engines.slots * context,
        kv=kv,
    )


def _step(recipe: Recipe) -> Step:
    trajectories = recipe.batch.groups * recipe.batch.siblings
    tokens = trajectories * recipe.model.context_tokens
    return Step(
        steps=recipe.steps,
        trajectories=trajectories,
        tokens=tokens,
        micro_batches=math.ceil(tokens / recipe.train.micro_tokens),
        last_version=recipe.steps,
    )


def _lanes(recipe: Recipe, problems: list[Problem]) -> tuple[tuple[LanePlan, ...], str]:
    """None where sandboxes are on hosts of an inventory: their daemons plan with the CPUs they find there."""
    if recipe.hosts:
        return (), ""
    try:
        cpus = plan_of(recipe.sandbox)
    except UserError as exc:
        problems.append(Problem(where="sandbox.serving_cpus", message=str(exc), hint=exc.hint, fatal=True))
        return (), ""
    if not (cpus.serving or cpus.merged or recipe.engines.attach):
        problems.append(
            Problem(
                where="sandbox.serving_cpus",
                message="no CPUs are kept for the engines: sandboxes run on all of them",
                hint='keep some where there are enough, e.g. "0-3"',
            )
        )
    apart = "a machine with more CPUs keeps them apart"
    problems += [Problem(where="sandbox.lanes", message=note, hint=apart) for note in cpus.notes]
    lanes = tuple(
        LanePlan(
            lane=lane,
            cpus=format_cpus(cpus.lanes[lane]),
            cap=getattr(recipe.sandbox.lanes, lane.value) or 2 * len(cpus.lanes[lane]),
            shared_with=cpus.merged_with(lane),
        )
        for lane in Lane
    )
    return lanes, format_cpus(cpus.serving)


def _machine(recipe: Recipe, serving: str, problems: list[Problem]) -> Machine:
    size = 0
    try:
        size = sum(file.stat().st_size for file in model_path(recipe).glob("*.safetensors"))
    except UserError as exc:
        said = str(exc).removeprefix("model.path: ")
        problems.append(Problem(where="model.path", message=said, hint=exc.hint, fatal=True))
    memory = psutil.virtual_memory()
    sandboxes = min(recipe.window_attempts, recipe.sandbox.max_live * max(1, len(recipe.sandbox_hosts)))
    return Machine(
        cpus=len(psutil.Process().cpu_affinity() or ()),
        serving_cpus=serving,
        memory_total=memory.total,
        memory_available=memory.available,
        sandboxes=sandboxes,
        sandboxes_memory=sandboxes * Limits().memory_mb * 2**20,
        model_bytes=size,
        weights_disk=size * (recipe.publish.keep_versions + 1),
        checkpoints_disk=size * _ADAM_COPIES * (recipe.train.keep_checkpoints + 1),
        disk_free=shutil.disk_usage(next(p for p in (RUNS, Path.cwd()) if p.is_dir())).free,
    )


def _fleet_problems(fleet: Fleet) -> Iterator[Problem]:
    if fleet.kv_wanted > fleet.kv_tokens > 0:
        yield Problem(
            where="engines.kv_tokens",
            message=f"all conversations at full length need {fleet.kv_wanted:,} tokens of KV, the engines hold"
            f" {fleet.kv_tokens:,}",
            hint="histories are evicted and computed again; raise kv_tokens, or lower window.attempts",
        )


def _machine_problems(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    if recipe.window_attempts > recipe.sandbox.max_live * max(1, len(recipe.sandbox_hosts)):
        yield Problem(
            where="sandbox.max_live",
            message=f"{machine.sandboxes} sandboxes for {recipe.window_attempts} conversations",
            hint="raise it: a conversation without a sandbox waits",
        )
    if machine.sandboxes_memory > machine.memory_available and not recipe.hosts:
        yield Problem(
            where="window.attempts",
            message=f"{machine.sandboxes} sandboxes may use up to {machine.sandboxes_memory / 1e9:.1f} GB,"
            f" {machine.memory_available / 1e9:.1f} GB are free",
            hint="fine for small tasks; else lower window.attempts or the tasks' memory_mb",
        )
    wanted = machine.weights_disk + machine.checkpoints_disk
    if wanted > machine.disk_free:
        yield Problem(
            where="publish.keep_versions",
            message=f"versions and checkpoints take {wanted / MB:,.0f} MB, {machine.disk_free / MB:,.0f} MB are free",
            hint="free space, or lower publish.keep_versions and train.keep_checkpoints",
            fatal=True,
        )
