"""Whether a recipe's hosts can do what it wants of them, before anything is started there.

One probe on each, all side by side, in seconds. `agentrl doctor` shows all that was found; whatever starts something
stops at the first failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

import agentrl
from agentrl.errors import AgentRLError, UnavailableError, UserError
from agentrl.hosts.claim import IN_USE, has
from agentrl.hosts.inventory import LOCAL, Sites, connected
from agentrl.hosts.survey import Ask, Clock, Facts, survey
from agentrl.ports import Host
from agentrl.recipe.schema import HostSpec, Recipe
from agentrl.sandbox.cpusets import Cpu, Topology, format_cpus, parse_cpus, plan_cpus
from agentrl.serve.wire import OLDEST_SGLANG, release
from agentrl.wiring.derive import model_path
from agentrl.wiring.findings import Finding, fail, ok, warn

_OLDEST_PYTHON = (3, 11)
_TESTED_SGLANG = (0, 5, 23)
# what of SGLang is used where it is there: (since, what)
_SGLANG_SINCE = (
    ((0, 5, 21), "weights by broadcast"),
    ((0, 5, 22), "attention DP by --attn-dp-size"),
)
_LEAST_DISK = 200 << 20  # for logs, sandboxes' files and agentrl itself
_GPU_MEMORY = 0.9  # of what a recipe calls it: drivers keep some, and makers round
_SKEW_S = 1.0  # logs of several hosts could no longer be read side by side; nothing that is counted depends on it


Mine = Collection[str] | None
"""Folders on the hosts (their names) whose processes are our own: others' are in the way. None: nothing is started."""


async def examine_inventory(recipe: Recipe) -> list[Finding]:
    """Of every host of the recipe, in its order, with a connection to each that is closed again."""
    found = await asyncio.gather(*(_visit(recipe, spec) for spec in recipe.hosts))
    return [finding for findings in found for finding in findings]


async def _visit(recipe: Recipe, spec: HostSpec) -> list[Finding]:
    try:
        async with connected(msgspec.structs.replace(recipe, hosts=(spec,)), Path(), "") as sites:
            return await examine_host(recipe, spec, sites[spec.name].host)
    except AgentRLError as exc:
        return [msgspec.structs.replace(_unreachable(exc), host=spec.name)]


async def require(recipe: Recipe, sites: Sites, *, roles: Collection[str] = ("engines", "sandbox")) -> None:
    """Raises ONE error, of the first host that cannot do its part: UserError where the recipe must change,
    UnavailableError where the host must. roles: what is about to be started."""
    mine = {site.run_dir.rpartition("/")[2] for site in sites.values()}
    starting = [
        msgspec.structs.replace(spec, roles=kept)
        for spec in recipe.hosts
        if (kept := tuple(role for role in spec.roles if role in roles))
    ]
    found = await asyncio.gather(*(examine_host(recipe, spec, sites[spec.name].host, mine) for spec in starting))
    failures = [finding for findings in found for finding in findings if finding.state == "fail"]
    if not failures:
        return
    first = failures[0]
    more = f" (and {len(failures) - 1} more: `agentrl doctor RECIPE` shows all)" if failures[1:] else ""
    kind = UserError if first.users else UnavailableError
    said = first.detail if first.name == "reachable" else f"{first.host}: {first.name}: {first.detail}"
    raise kind(said + more, hint=first.remedy)


async def examine_host(recipe: Recipe, spec: HostSpec, host: Host, mine: Mine = None) -> list[Finding]:
    """A host that cannot be reached is one finding."""
    try:
        facts, clock = await survey(host, ask_of(recipe, spec, host))
    except AgentRLError as exc:
        found = [_unreachable(exc)]
    else:
        found = list(judge(recipe, spec, facts, clock, mine))
    return [msgspec.structs.replace(finding, host=spec.name) for finding in found]


def _engines_of(recipe: Recipe, spec: HostSpec) -> list[int]:
    """Numbers of those that are started there."""
    if recipe.engines.attach or "engines" not in spec.roles:
        return []
    return [index for index, name in enumerate(recipe.engine_hosts) if name == spec.name]


def _unreachable(exc: AgentRLError) -> Finding:
    return fail("reachable", str(exc), exc.hint, users=isinstance(exc, UserError))


def ask_of(recipe: Recipe, spec: HostSpec, host: Host) -> Ask:
    engines, sandbox, mine = recipe.engines, recipe.sandbox, _engines_of(recipe, spec)
    return Ask(
        python=host.python,
        home=host.home,
        engines_python=engines.python if engines.kind == "sglang" else "",
        docker=sandbox.docker.url or "unix:///var/run/docker.sock",
        ports=tuple(engines.base_port + index for index in mine) if engines.base_port else (),
        sandbox=msgspec.to_builtins(sandbox) if "sandbox" in spec.roles and not sandbox.attach else None,
    )


def judge(recipe: Recipe, spec: HostSpec, facts: Facts, clock: Clock, mine: Mine = None) -> Iterator[Finding]:
    """Pure: what the facts mean for this recipe."""
    who = facts.who
    yield ok("reachable", f"{who.user} at {who.machine}: {who.system}, kernel {who.kernel}")
    yield _python(facts)
    yield _agentrl(facts)
    engines = len(_engines_of(recipe, spec))
    if engines:
        yield from _engines(recipe, engines, facts)
    yield _gpus(recipe, engines, facts)
    yield _others(recipe, spec, facts, mine)
    if "sandbox" in spec.roles and not recipe.sandbox.attach:
        yield _sandboxes(recipe, facts)
    yield _docker(recipe, spec, facts)
    yield _rights(facts)
    yield _cpus(recipe, spec, facts)
    yield ok("memory", f"{facts.memory.available / 1e9:.1f} of {facts.memory.total / 1e9:.1f} GB free")
    yield _disk(recipe, spec, engines, facts)
    yield _clock(clock)


def _python(facts: Facts) -> Finding:
    found = facts.python
    if found.fault:
        return fail(
            "python",
            f"{found.path}: {found.fault}",
            "`agentrl hosts install RECIPE` makes it, or name another by hosts.python",
        )
    if release(found.version)[:2] < _OLDEST_PYTHON:
        return fail(
            "python", f"{found.path} is {found.version}", "install Python 3.11 or newer, and name it by hosts.python"
        )
    return ok("python", f"{found.version} at {found.path}")


def _agentrl(facts: Facts) -> Finding:
    there, here = facts.python.agentrl, agentrl.__version__
    install = "`agentrl hosts install RECIPE` puts this version there"
    if not there:
        return fail("agentrl", f"not installed in {facts.python.path}", install)
    if there != here:
        return fail("agentrl", f"{there}, here it is {here}", install)
    return ok("agentrl", f"{there}, as here")


def _engines(recipe: Recipe, count: int, facts: Facts) -> Iterator[Finding]:
    section, found = recipe.engines, facts.serving
    if facts.ports_taken:
        ports = ", ".join(map(str, facts.ports_taken))
        yield fail("ports", f"taken: {ports}", "end what listens there, or choose another engines.base_port, or 0")
    if section.kind == "embedded":
        if not found.torch:
            yield fail("engines", f"{found.path} has no torch", "`agentrl hosts install RECIPE` brings it")
        else:
            yield ok("engines", f"{count} embedded, torch {found.torch}")
        return
    install = f"pip install 'sglang>={_dotted(OLDEST_SGLANG)}' there, or name its interpreter by engines.python"
    if not found.sglang:
        yield fail("engines", f"{found.path} has no sglang{f' ({found.fault})' if found.fault else ''}", install)
        return
    version, said = release(found.sglang), f"{count} of sglang {found.sglang} in {found.path}"
    lacking = [what for since, what in _SGLANG_SINCE if version < since]
    if version < OLDEST_SGLANG:
        yield fail("engines", f"{said}: older than {_dotted(OLDEST_SGLANG)}", install)
    elif section.ranks > 1 and version < _SGLANG_SINCE[1][0]:
        yield fail("engines", f"{said}: no {_SGLANG_SINCE[1][1]}, and engines.ranks is {section.ranks}", install)
    elif version > _TESTED_SGLANG:
        newer = f"tested up to {_dotted(_TESTED_SGLANG)}: look at the first step's logprob_gap"
        yield warn("engines", f"{said}: newer than what was tested", newer)
    else:
        yield ok("engines", said + (f", without {' and '.join(lacking)}" if lacking else ""))


def _gpus(recipe: Recipe, engines: int, facts: Facts) -> Finding:
    section, found = recipe.engines, facts.gpus
    wanted = engines * section.split if section.kind == "sglang" and "cpu" not in section.args else 0
    kinds = {f"{gpu.name} ({gpu.memory_mb / 1024:.0f} GiB)" for gpu in found.gpus}
    said = f"{len(found.gpus)} of {', '.join(sorted(kinds))}, driver {found.driver}" if found.gpus else found.fault
    if wanted and not found.gpus:
        return fail(
            "GPUs", f"none ({said}), the engines want {wanted}", "run the engines elsewhere, or with --device cpu"
        )
    if wanted > len(found.gpus):
        return fail("GPUs", f"{said}: the engines want {wanted}", "fewer engines or ranks there", users=True)
    smallest = min((gpu.memory_mb * 2**20 / 1e9 for gpu in found.gpus), default=0.0)
    if wanted and smallest < _GPU_MEMORY * section.gpu_gb:
        sized = f"{said}: of {smallest:.0f} GB, engines.gpu_gb says {section.gpu_gb:g}"
        return fail("GPUs", sized, "correct engines.gpu_gb, and look at `agentrl plan` again", users=True)
    busy = [index for index, gpu in enumerate(found.gpus) if gpu.used_mb > gpu.memory_mb // 20]
    if wanted and busy:
        return warn("GPUs", f"{said}; memory of {', '.join(map(str, busy))} is in use", "see who: nvidia-smi")
    return ok("GPUs", said if found.gpus else "none, none needed")


def _others(recipe: Recipe, spec: HostSpec, facts: Facts, mine: Mine) -> Finding:
    """GPUs and CPU sets are for one at a time. What runs in another role, or is attached to, disturbs nobody."""
    attached = {"engines": recipe.engines.attach, "sandbox": recipe.sandbox.attach}
    strangers = [one for one in facts.started if one.run not in (mine or ())]
    taken = [one for one in strangers if one.role in spec.roles and not attached[one.role]]
    if not taken:
        return ok("in use", "by nobody else")
    said = "; ".join(has(one, one.role) for one in taken)
    return warn("in use", said, IN_USE) if mine is None else fail("in use", said, IN_USE)


def _sandboxes(recipe: Recipe, facts: Facts) -> Finding:
    backend, tried = recipe.sandbox.backend, facts.sandbox
    if tried is not None and not tried.fault:
        return ok("sandboxes", tried.isolation)
    if facts.namespaces and backend in ("namespace", "bubblewrap"):
        remedy = (
            "let users make namespaces there (sysctl user.max_user_namespaces, and"
            " kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu), log in as root, or choose sandbox.backend"
        )
        return fail("sandboxes", f"{facts.who.user} may not make namespaces ({facts.namespaces})", remedy)
    if backend == "docker" and facts.docker.fault:
        return fail(
            "sandboxes", f"docker: {facts.docker.fault}", "install and start it there, and let this user use it"
        )
    if tried is None or not facts.python.agentrl:
        return warn("sandboxes", "not tried: agentrl is not there", "install agentrl first")
    return fail("sandboxes", tried.fault, tried.hint)


def _docker(recipe: Recipe, spec: HostSpec, facts: Facts) -> Finding:
    needed = recipe.sandbox.backend == "docker" and "sandbox" in spec.roles
    said = f"engine {facts.docker.version}" if facts.docker.version else facts.docker.fault
    return ok("docker", said if needed else f"not needed; {said}")  # where it is needed, `sandboxes` says the rest


def _rights(facts: Facts) -> Finding:
    root = facts.who.uid == 0
    said = "root" if root else f"{facts.who.user}, {'sudo without a password' if facts.sudo else 'no sudo'}"
    return ok("rights", f"{said}; namespaces {'may' if not facts.namespaces else 'may not'} be made")


def _cpus(recipe: Recipe, spec: HostSpec, facts: Facts) -> Finding:
    cpus = tuple(Cpu(id=number, core=core, node=node) for number, core, node in facts.cpus.usable)
    cores, nodes = len({cpu.core for cpu in cpus}), len({cpu.node for cpu in cpus})
    said = f"{len(cpus)} CPUs, {cores} cores, {facts.cpus.sockets} sockets, {nodes} NUMA nodes"
    if "sandbox" not in spec.roles or recipe.sandbox.attach:
        return ok("CPUs", said)
    try:
        plan = plan_cpus(Topology(cpus=cpus), serving=parse_cpus(spec.serving_cpus or recipe.sandbox.serving_cpus))
    except UserError as exc:
        return fail("CPUs", f"{said}: {exc}", exc.hint, users=True)
    lanes = ", ".join(f"{lane} {format_cpus(owned)}" for lane, owned in plan.lanes.items())
    said += f"; serving {format_cpus(plan.serving) or 'none'}; {lanes}"
    if plan.merged:
        return warn("CPUs", said, "fine to try things; figures of lanes that share CPUs disturb one another")
    return ok("CPUs", said)


def _disk(recipe: Recipe, spec: HostSpec, engines: int, facts: Facts) -> Finding:
    found, remedy = facts.disk, "free space there, or set hosts.home"
    weights = _weights_bytes(recipe) if engines and spec.weights != "shared" and spec.address != LOCAL else 0
    said = f"{found.free / 1e9:.2f} of {found.total / 1e9:.2f} GB free at {found.path}"
    if found.fault:
        return fail("disk", f"{said}: cannot be written: {found.fault}", remedy)
    if found.free < _LEAST_DISK + (weights if spec.weights == "copy" else 0):
        return fail("disk", f"{said}, {(_LEAST_DISK + weights) / 1e9:.2f} are wanted", remedy)
    if found.free < _LEAST_DISK + weights:
        shared = f'{remedy}; or share the run\'s folder: then hosts.weights = "shared" says so'
        return warn("disk", f"{said}; weights that are copied there take {weights / 1e9:.2f}", shared)
    return ok("disk", said)


def _weights_bytes(recipe: Recipe) -> int:
    """Of all versions that a host may hold at once. 0 where there is no model: others say so."""
    try:
        size = sum(file.stat().st_size for file in model_path(recipe).glob("*.safetensors"))
    except UserError:
        return 0
    return size * (recipe.publish.keep_versions + 1)


def _clock(clock: Clock) -> Finding:
    said = f"{clock.offset_s:+.3f} s against here (± {clock.error_s:.3f} s)"
    if abs(clock.offset_s) - clock.error_s > _SKEW_S:
        return warn("clock", said, "harmless to a run; for logs side by side let NTP set it")
    return ok("clock", said)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
