"""Preflight: whether this machine can run a recipe. Seconds; whatever is tried is undone."""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import agentrl
from agentrl.errors import AgentRLError, UserError
from agentrl.hosts.local import LocalHost
from agentrl.recipe.schema import Recipe
from agentrl.rollout.template import ChatTemplate
from agentrl.sandbox.backends import make_backend
from agentrl.serve.launch import attach_engine
from agentrl.wiring import machine
from agentrl.wiring.borrowed import token_of
from agentrl.wiring.derive import model_path, task_source
from agentrl.wiring.findings import Finding, fail, ok, warn
from agentrl.wiring.models import check_model
from agentrl.wiring.plan import Plan, plan
from agentrl.wiring.preflight import examine_inventory

_LIMIT_S = 60.0  # of one check
_QUICK_S = 10.0

Check = tuple[str, Callable[[], Awaitable[Finding]]]


async def examine(recipe: Recipe) -> list[Finding]:
    """All checks side by side, each with a time limit, in the order in which they are shown: this machine's, then those
    of each host of the inventory."""
    planned = await asyncio.to_thread(plan, recipe)
    checks: list[Check] = [
        ("python", _python),
        ("recipe", lambda: _recipe(planned)),
        ("model", lambda: _model(recipe)),
        ("tasks", lambda: _tasks(recipe)),
        ("libraries", lambda: _libraries(recipe)),
        *([] if recipe.hosts else _of_a_lone_machine(recipe, planned)),
        ("memory", lambda: _memory(planned, boxes=not recipe.hosts)),
        ("disk", lambda: _disk(planned)),
        ("clock", _clock),
    ]
    here, there = await asyncio.gather(
        asyncio.gather(*(_limited(name, check) for name, check in checks)), examine_inventory(recipe)
    )
    return [*here, *there]


def _of_a_lone_machine(recipe: Recipe, planned: Plan) -> list[Check]:
    """What is asked of the hosts where there is an inventory."""
    return [
        ("engines", lambda: _engines(recipe)),
        ("ports", lambda: _ports(recipe)),
        ("sandboxes", lambda: _sandboxes(recipe)),
        ("docker", lambda: _docker(recipe)),
        ("CPUs", lambda: _cpus(planned)),
        ("GPUs", lambda: _gpus(recipe)),
    ]


async def _limited(name: str, check: Callable[[], Awaitable[Finding]]) -> Finding:
    """A check that fails in a typed way is a finding, not the end of the examination."""
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await check()
    except TimeoutError:
        return fail(name, f"not known after {_LIMIT_S:g} s", "look why this machine is so slow")
    except AgentRLError as exc:
        return fail(name, str(exc), exc.hint, users=isinstance(exc, UserError))


async def _python() -> Finding:
    return ok("python", f"{platform.python_version()} at {sys.executable}, agentrl {agentrl.__version__}")


async def _recipe(found: Plan) -> Finding:
    fatal = [problem for problem in found.problems if problem.fatal and problem.where != "model.path"]
    if fatal:
        return fail("recipe", f"{fatal[0].where}: {fatal[0].message}", fatal[0].hint, users=True)
    if found.problems:
        return ok("recipe", f"{len(found.problems)} notes: see `agentrl plan`")
    return ok("recipe", "no problems")


async def _model(recipe: Recipe) -> Finding:
    folder = model_path(recipe)
    size = await asyncio.to_thread(check_model, folder)
    await asyncio.to_thread(ChatTemplate.from_folder, folder)
    return ok("model", f"{folder}: {size / 1e6:,.1f} MB of weights, tokenizer and chat template load")


async def _tasks(recipe: Recipe) -> Finding:
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as scratch:
        source = await asyncio.to_thread(task_source, recipe, Path(scratch))
        first = (await asyncio.to_thread(source.next_tasks, 1))[0]
    return ok("tasks", f"{recipe.tasks.source}: the first is {first.id}")


async def _libraries(recipe: Recipe) -> Finding:
    """In a process of its own: importing torch takes seconds and a broken build may crash."""
    here = recipe.engines.kind == "embedded" and not recipe.engines.attach and not recipe.hosts
    wanted = ["torch", "safetensors"] if here else []
    wanted += ["torch", "transformers", "safetensors"] if recipe.train.embedded else []
    wanted = list(dict.fromkeys(wanted))
    if not wanted:
        return ok("libraries", "none wanted: neither trainer nor embedded engine run here")
    code, said = await _import(sys.executable, wanted)
    if code != 0:
        last = said.strip().splitlines()[-1] if said.strip() else f"exit {code}"
        return fail("libraries", last, "pip install 'agentrl[local]'")
    return ok("libraries", said.strip())


async def _import(python: str, names: Sequence[str]) -> tuple[int, str]:
    source = f"import {', '.join(names)}; print(*(f'{{m.__name__}} {{m.__version__}}' for m in ({', '.join(names)},)))"
    return await LocalHost().run([python, "-W", "ignore", "-c", source], timeout_s=_LIMIT_S)


async def _engines(recipe: Recipe) -> Finding:
    section = recipe.engines
    if section.attach:
        token, versions = await asyncio.to_thread(token_of, section), []
        for index, url in enumerate(section.attach):
            engine, info = await attach_engine(f"e{index}", url, token, section)
            await engine.aclose()
            versions.append(f"{url} ({info.kind} {info.software}, version {info.version})")
        return ok("engines", "attached: " + ", ".join(versions))
    if section.kind == "embedded":
        return ok("engines", f"{section.count} embedded, started with the run")
    python = section.python or sys.executable
    code, said = await LocalHost().run(
        [python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"], timeout_s=_QUICK_S
    )
    if code != 0:
        return fail("engines", f"{python} has no sglang", "install it there, or set engines.python", users=False)
    return ok("engines", f"{section.count} of sglang {said.strip()} in {python}")


async def _ports(recipe: Recipe) -> Finding:
    section = recipe.engines
    if section.attach or not section.base_port:
        return ok("ports", f"any free one is taken, e.g. {machine.free_port()}")
    machine.check_ports(section)
    return ok("ports", f"{section.base_port} to {section.base_port + section.count - 1} are free")


async def _sandboxes(recipe: Recipe) -> Finding:
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as state:
        backend = make_backend(recipe.sandbox, state_dir=state)
        try:
            await backend.probe()
            said = f"{backend.name} works as {machine.user()} ({machine.cgroups()}): {backend.isolation}"
        finally:
            await backend.aclose()
    return ok("sandboxes", said)


async def _docker(recipe: Recipe) -> Finding:
    client = shutil.which("docker")
    if client is None:
        said = "no docker client"
    else:
        url = recipe.sandbox.docker.url
        asked = [client, *(["--host", url] if url else []), "version", "--format", "{{.Server.Version}}"]
        code, said = await LocalHost().run(asked, timeout_s=_QUICK_S)
        said = f"engine {said.strip()}" if code == 0 else f"no daemon ({said.strip().splitlines()[-1][:120]})"
    needed = recipe.sandbox.backend == "docker"  # then `sandboxes` has tried it
    return ok("docker", said if needed else f"not needed; {said}")


async def _cpus(found: Plan) -> Finding:
    lanes = ", ".join(f"{lane.lane} {lane.cpus}" for lane in found.lanes)
    shared = sorted({lane.lane for lane in found.lanes if lane.shared_with})
    if shared:
        remedy = "fine to try things; figures of lanes that share CPUs disturb one another"
        return warn("CPUs", f"{found.machine.cpus}: {lanes} ({', '.join(shared)} share)", remedy)
    return ok("CPUs", f"{found.machine.cpus}: {lanes}")


async def _gpus(recipe: Recipe) -> Finding:
    said = await machine.gpus(LocalHost(), timeout_s=_QUICK_S)
    if not said and recipe.engines.kind == "sglang" and not recipe.engines.attach and "cpu" not in recipe.engines.args:
        return fail("GPUs", "no driver here, and the engines are sglang", "run on a GPU host, or --device cpu")
    return ok("GPUs", said or "none, none needed")


async def _memory(planned: Plan, *, boxes: bool) -> Finding:
    """boxes: sandboxes are here."""
    found = planned.machine
    said = f"{found.memory_available / 1e9:.1f} of {found.memory_total / 1e9:.1f} GB free"
    if boxes and found.sandboxes_memory > found.memory_available:
        limits = f"{said}; the limits of {found.sandboxes} sandboxes sum to {found.sandboxes_memory / 1e9:.1f} GB"
        return warn("memory", limits, "fine for small tasks; else lower window.attempts")
    return ok("memory", said)


async def _disk(planned: Plan) -> Finding:
    found = planned.machine
    wanted = found.weights_disk + found.checkpoints_disk
    said = f"{found.disk_free / 1e9:.1f} GB free here, versions and checkpoints take {wanted / 1e6:,.0f} MB"
    if wanted > found.disk_free:
        return fail("disk", said, "free space, or lower publish.keep_versions")
    if not machine.writable("."):
        return fail("disk", "this folder cannot be written", "run elsewhere, or give --run-dir")
    return ok("disk", said)


async def _clock() -> Finding:
    return ok("clock", machine.clock())
