"""Rules that relate several keys of a recipe. `load` refuses what cannot work; `plan` shows all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentrl.recipe.schema import Recipe, Section

_SGLANG_ONLY = ("gpus", "experts_over", "kv_dtype", "memory_share", "gpu_gb", "prefill_tokens", "draft_tokens")


class Problem(Section):
    """fatal: the run could not work. Otherwise it works worse than its author may think."""

    where: str  # TOML path
    message: str
    hint: str
    fatal: bool = False


def check(recipe: Recipe) -> list[Problem]:
    """What is wrong or doubtful about the recipe as a whole, fatal first."""
    return sorted(_problems(recipe), key=lambda problem: not problem.fatal)


def _problems(recipe: Recipe) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", recipe.name):
        yield Problem(
            where="name",
            message=f"{recipe.name!r} cannot name a folder",
            hint="use letters, digits, dots, dashes and underscores",
            fatal=True,
        )
    yield from _batch(recipe)
    yield from _window(recipe)
    yield from _rounds(recipe)
    yield from _lengths(recipe)
    yield from _engines(recipe)
    yield from _transfer(recipe)
    yield from _times(recipe)
    if recipe.hosts:
        yield from _hosts(recipe)
    if recipe.tasks.source == "harbor" and not recipe.tasks.path:
        yield Problem(
            where="tasks.path",
            message="empty, but the source is harbor",
            hint="name the folder that holds the task folders",
            fatal=True,
        )
    yield from _sandbox(recipe)
    if recipe.tasks.source != "chores" and recipe.tasks.kinds:
        yield Problem(where="tasks.kinds", message="only chores have kinds", hint="leave it out", fatal=True)
    if recipe.tasks.source != "chores" and recipe.tasks.tests_wait_s:
        yield Problem(where="tasks.tests_wait_s", message="only chores' tests wait", hint="leave it out", fatal=True)


def _sandbox(recipe: Recipe) -> Iterator[Problem]:
    sandbox = recipe.sandbox
    if sandbox.backend == "docker":
        if not sandbox.image and recipe.tasks.source == "chores":
            yield Problem(
                where="sandbox.image",
                message="empty, but the backend is docker and chores name no image",
                hint="name one that the engine has, with a shell and Python: `docker pull python:3.11-slim`",
                fatal=True,
            )
        if sandbox.root != "/":
            yield Problem(where="sandbox.root", message="docker's is the image", hint="leave it out", fatal=True)
    elif sandbox.image:
        yield Problem(
            where="sandbox.image",
            message=f"the {sandbox.backend} backend takes no image",
            hint='set sandbox.backend = "docker", or leave it out',
            fatal=True,
        )


def _batch(recipe: Recipe) -> Iterator[Problem]:
    if recipe.batch.siblings == 1:
        yield Problem(
            where="batch.siblings",
            message=f"1 sibling has no advantage over its group ({recipe.train.advantage}): every gradient would be 0",
            hint="give a group at least 2 siblings",
            fatal=True,
        )
    longest = recipe.model.context_tokens
    if recipe.train.micro_tokens < longest:
        yield Problem(
            where="train.micro_tokens",
            message=f"{recipe.train.micro_tokens} cannot hold one trajectory of {longest} tokens",
            hint="raise it to at least model.context_tokens",
            fatal=True,
        )


def _rounds(recipe: Recipe) -> Iterator[Problem]:
    if recipe.window_groups < recipe.round_groups:
        yield Problem(
            where="window.groups",
            message=f"{recipe.window_groups} cannot hold a round of {recipe.round_groups} groups",
            hint="raise it, leave it out, or lower schedule.round_steps",
            fatal=True,
        )
    if recipe.schedule.mode != "async" and recipe.schedule.round_steps - 1 > recipe.freshness.K:
        yield Problem(
            where="freshness.K",
            message=f"{recipe.freshness.K}, but the last of {recipe.schedule.round_steps} steps of a round trains on"
            f" groups of age {recipe.schedule.round_steps - 1}",
            hint="raise K to at least schedule.round_steps - 1",
            fatal=True,
        )


def _window(recipe: Recipe) -> Iterator[Problem]:
    window, batch, K = recipe.window_groups, recipe.batch.groups, recipe.freshness.K
    if window < batch:
        yield Problem(
            where="window.groups",
            message=f"{window} open groups can never fill a batch of {batch}",
            hint=f"set it to 0 (twice the batch) or to at least {batch}",
            fatal=True,
        )
        return
    if window == batch:
        yield Problem(
            where="window.groups",
            message="no surplus over the batch: each step waits for its slowest group",
            hint=f"twice the batch ({2 * batch}) lets the fast groups go first",
        )
    # a group sees W/B new versions on average while in flight; twice that leaves room for the slow ones
    wanted = -(-2 * window // batch)
    if wanted > K and recipe.window.groups != "auto":
        yield Problem(
            where="freshness.K",
            message=f"{K} with {window} open groups and batches of {batch}: long conversations may go stale",
            hint=f"K of at least 2 W/B = {wanted}, or a smaller window",
        )
    started = batch * (recipe.batch.siblings + recipe.batch.spare)
    if recipe.window_attempts < started:
        yield Problem(
            where="window.attempts",
            message=f"{recipe.window_attempts} conversations at once, one batch needs {started}",
            hint="raise window.attempts, engines.slots or engines.count",
        )


def _lengths(recipe: Recipe) -> Iterator[Problem]:
    context, reply = recipe.model.context_tokens, recipe.rollout.max_new_tokens
    if reply >= context:
        yield Problem(
            where="rollout.max_new_tokens",
            message=f"one reply of {reply} tokens leaves no room for a prompt in {context} (model.context_tokens)",
            hint="lower it, or raise model.context_tokens",
            fatal=True,
        )
    elif reply * recipe.rollout.max_turns > context:
        yield Problem(
            where="rollout.max_turns",
            message=f"{recipe.rollout.max_turns} turns of {reply} tokens do not fit the context of {context}",
            hint="conversations may end as context_full; raise model.context_tokens or lower one of the two",
        )


def _engines(recipe: Recipe) -> Iterator[Problem]:
    engines = recipe.engines
    yield from _sglang(recipe)
    if not engines.kv_tokens:
        if engines.kind == "embedded":
            yield _fatal("engines.kv_tokens", "0, but the embedded engine must be told", "set it, or leave it out")
    elif engines.kv_tokens < recipe.model.context_tokens:
        yield Problem(
            where="engines.kv_tokens",
            message=f"{engines.kv_tokens} cannot hold one conversation of {recipe.model.context_tokens} tokens",
            hint="raise it to slots * model.context_tokens",
            fatal=True,
        )
    elif engines.kv_tokens < engines.slots * recipe.model.context_tokens:
        yield Problem(
            where="engines.kv_tokens",
            message=f"{engines.kv_tokens} may not hold {engines.slots} slots of {recipe.model.context_tokens} tokens",
            hint="engines will evict histories; raise kv_tokens or lower slots",
        )
    if engines.attach and len(engines.attach) != engines.count:
        yield Problem(
            where="engines.attach",
            message=f"{len(engines.attach)} URLs for engines.count = {engines.count}",
            hint="list one URL for each engine",
            fatal=True,
        )
    if recipe.publish.max_unavailable >= engines.count > 1 and recipe.publish.order == "rolling":
        yield Problem(
            where="publish.max_unavailable",
            message="all engines may swap at once: nothing is generated meanwhile",
            hint=f"at most {engines.count - 1} of {engines.count}",
        )


def _sglang(recipe: Recipe) -> Iterator[Problem]:
    """How one engine is split over its GPUs."""
    engines = recipe.engines
    if engines.split % engines.ranks:
        yield _fatal(
            "engines.gpus",
            f"{engines.gpus} GPUs cannot be shared evenly by {engines.ranks} ranks",
            "a multiple of engines.ranks, or 0",
        )
    if engines.experts_over and engines.split % engines.experts_over:
        yield _fatal(
            "engines.experts_over",
            f"{engines.experts_over} of {engines.split} GPUs",
            "a divisor of engines.gpus, or 0",
        )
    if engines.kind == "embedded":
        for key in _SGLANG_ONLY:
            if getattr(engines, key) != getattr(type(engines)(), key):
                yield _fatal(f"engines.{key}", "only SGLang has it", 'set engines.kind = "sglang", or leave it out')


def _transfer(recipe: Recipe) -> Iterator[Problem]:
    if recipe.publish.transfer != "distributed":
        return
    where = "publish.transfer"
    if recipe.engines.kind != "sglang":
        yield _fatal(where, "distributed, but the embedded engine reads from the disk only", 'leave it out, or "disk"')
    if recipe.engines.attach:
        yield _fatal(where, "distributed, but the engines are somebody else's (engines.attach)", 'set it to "disk"')
    away = [host.name for host in recipe.hosts if "engines" in host.roles and host.address != "local"]
    if away and recipe.publish.address in ("127.0.0.1", "localhost", "::1"):
        yield _fatal(
            "publish.address",
            f"{recipe.publish.address} is another machine for {away[0]}",
            "name this machine's address on the network of the engines' hosts",
        )


def _times(recipe: Recipe) -> Iterator[Problem]:
    attempt = recipe.schedule.attempt_timeout_s
    if recipe.sandbox.lease_s < recipe.engines.request_timeout_s:
        yield Problem(
            where="sandbox.lease_s",
            message=f"a sandbox unused for {recipe.sandbox.lease_s:g} s is reaped, one reply may take "
            f"{recipe.engines.request_timeout_s:g} s",
            hint="make it longer than engines.request_timeout_s",
            fatal=True,
        )
    if attempt < recipe.engines.request_timeout_s:
        yield Problem(
            where="schedule.attempt_timeout_s",
            message=f"an attempt of {attempt:g} s ends before one reply may ({recipe.engines.request_timeout_s:g} s)",
            hint="make it longer than engines.request_timeout_s",
        )


def _hosts(recipe: Recipe) -> Iterator[Problem]:
    names = [host.name for host in recipe.hosts]
    for host in recipe.hosts:
        where = f"hosts.{host.name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host.name):
            yield _fatal("hosts", f"{host.name!r} cannot name a host", "use letters, digits, dots and dashes")
        if names.count(host.name) > 1:
            yield _fatal(where, "two hosts have this name", "give each its own; `address` may be the same")
        if host.engines and "engines" not in host.roles:
            yield _fatal(
                f"{where}.engines", f"{host.engines}, but it has no role engines", "add the role, or leave it out"
            )
        if host.home and not host.home.startswith(("/", "~/")):
            yield _fatal(f"{where}.home", f"{host.home!r} is not absolute", "begin it with / or ~/")
        if host.python and not host.python.startswith("/"):
            yield _fatal(f"{where}.python", f"{host.python!r} is not absolute", "begin it with /")
    for role, attach in (("engines", recipe.engines.attach), ("sandbox", recipe.sandbox.attach)):
        having = [host.name for host in recipe.hosts if role in host.roles]
        if not (attach or having):
            yield _fatal("hosts", f"no host has the role {role}", f'add "{role}" to a host\'s roles')
    placed, count = len(recipe.engine_hosts), recipe.engines.count
    if not recipe.engines.attach and placed and placed != count:
        yield _fatal(
            "engines.count",
            f"{count}, but the hosts' `engines` come to {placed}",
            "make the two agree, or leave `engines` out of one host: it takes what is left",
        )


def _fatal(where: str, message: str, hint: str) -> Problem:
    return Problem(where=where, message=message, hint=hint, fatal=True)
