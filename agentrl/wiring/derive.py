"""What follows from a recipe before anything runs: the model folder, the scheduler's policy, the orders, the tasks."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from pathlib import Path

import msgspec

import agentrl
from agentrl import ports
from agentrl.errors import TaskError, UserError
from agentrl.recipe.schema import Recipe
from agentrl.records import AttemptId, GroupId, Sampling, Task, TaskId
from agentrl.rollout.order import Order
from agentrl.scheduler.policy import Policy
from agentrl.tasks.chores import ChoresSource
from agentrl.tasks.harbor import HarborSource
from agentrl.wiring.images import require


def model_path(recipe: Recipe) -> Path:
    """The initial policy's folder. UserError where it is not there."""
    name = recipe.model.path
    shipped = Path(agentrl.__file__).parent / "models" / name.removeprefix("builtin:")
    path = shipped if name.startswith("builtin:") else Path(name)
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path: {name}: no model here ({path / 'config.json'} is missing)",
            hint="name a model folder, or builtin:tiny",
        )
    return path


def policy_of(recipe: Recipe) -> Policy:
    return Policy(
        steps=recipe.steps,
        groups=recipe.batch.groups,
        siblings=recipe.batch.siblings,
        spare=recipe.batch.spare,
        window_groups=recipe.window_groups,
        window_attempts=recipe.window_attempts,
        bound=recipe.freshness.K,
        auto=recipe.window.groups == "auto",
        retries=recipe.schedule.retries,
        attempt_timeout_s=recipe.schedule.attempt_timeout_s,
        stall_s=recipe.schedule.stall_s,
        order=recipe.publish.order,
        max_unavailable=recipe.publish.max_unavailable,
        in_flight=recipe.publish.in_flight,
        when_stale=recipe.freshness.when_stale,
        mode=recipe.schedule.mode,
        round_groups=recipe.round_groups,
        admission=recipe.schedule.admission,
        finish_timeout_s=recipe.publish.finish_timeout_s,
        move_margin=recipe.schedule.move_margin,
    )


def task_source(recipe: Recipe, folder: Path) -> ports.TaskSource:
    """UserError where the tasks that the recipe names are not there, one of their folders is broken, or an image of
    theirs is not there. Blocks, so call it where no event loop runs."""
    if recipe.tasks.source == "harbor":
        try:
            docker = recipe.sandbox.backend == "docker"
            source = HarborSource(Path(recipe.tasks.path), seed=recipe.seed, images=docker)
        except TaskError as exc:
            raise UserError(f"tasks.path: {exc}", hint=exc.hint) from exc
        asyncio.run(require(recipe, source.tasks))
        return source
    return ChoresSource(
        folder / "tasks",
        kinds=recipe.tasks.kinds,
        instances=recipe.tasks.instances,
        seed=recipe.seed,
        tests_wait_s=recipe.tasks.tests_wait_s,
    )


def order_template(recipe: Recipe, label: str) -> Order:
    blank = Task(id=TaskId(""), kind="", instruction="", root="")
    return Order(
        attempt=AttemptId(GroupId(0), 0, 0),
        task=blank,
        sampling=Sampling(
            max_new_tokens=recipe.rollout.max_new_tokens,
            temperature=recipe.rollout.temperature,
            top_p=recipe.rollout.top_p,
        ),
        context_tokens=recipe.model.context_tokens,
        max_turns=recipe.rollout.max_turns,
        label=label,
        parse_limit=recipe.rollout.parse_limit,
        observation_chars=recipe.rollout.observation_chars,
        system=recipe.rollout.system,
        lease_s=recipe.sandbox.lease_s,
        request_timeout_s=recipe.engines.request_timeout_s,
        deadline_s=recipe.schedule.attempt_timeout_s,
        regenerate=recipe.publish.in_flight == "regenerate",
    )


def identity(recipe: Recipe) -> str:
    """What must not change between two processes of one run: all but how long it goes on and how it is served.

    The scheduler's policy counts as a whole, since parts of it follow from how the run is served.
    """
    served = {name: type(getattr(recipe, name))() for name in ("engines", "sandbox", "telemetry", "hosts")}
    stable = msgspec.structs.replace(recipe, steps=1, **served)
    policy = msgspec.structs.replace(policy_of(recipe), steps=1)
    return hashlib.sha256(msgspec.json.encode((stable, policy))).hexdigest()[:16]


def label_of(name: str, folder: Path) -> str:
    """What a run's sandboxes, processes and folders are marked with, on whatever host: no other run's, and the same
    when it is resumed."""
    return f"{name}-{hashlib.sha256(token_file(folder).read_bytes()).hexdigest()[:8]}"


def token_file(folder: Path) -> Path:
    """The run's secret, readable by its owner only; kept over restarts."""
    path = folder / "token"
    if not path.exists():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
    return path
