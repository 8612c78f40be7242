"""What is found on a host, and what it means for a recipe: the judgement is pure, so every machine can be made up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrl
from agentrl.errors import DeadlineError, UnavailableError, UserError
from agentrl.hosts.inventory import Site, Sites
from agentrl.hosts.survey import Ask, Clock, Facts, between, survey
from agentrl.recipe.schema import Engines, HostSpec, Recipe, Sandbox
from agentrl.wiring.findings import Finding
from agentrl.wiring.preflight import ask_of, judge, require

SPEC = HostSpec(name="h1")
PYTHON = {"path": "/venv/python", "version": "3.11.9", "agentrl": agentrl.__version__, "fault": ""}
GPU = {"name": "NVIDIA B300", "memory_mb": 288_000, "used_mb": 4}
FACTS: dict[str, Any] = {
    "who": {"user": "rl", "uid": 1000, "machine": "gpu-1", "system": "Ubuntu 24.04", "kernel": "6.8"},
    "python": PYTHON | {"sglang": "0.5.23", "torch": "2.13.0"},
    "engines_python": None,
    "gpus": {"driver": "590.1", "gpus": [GPU] * 8, "fault": ""},
    "docker": {"version": "28.1", "fault": ""},
    "disk": {"path": "/home/rl", "free": 10**12, "total": 2 * 10**12, "fault": ""},
    "cpus": {"usable": [[cpu, cpu % 8, cpu // 4 % 2] for cpu in range(16)], "sockets": 2},
    "memory": {"total": 10**12, "available": 9 * 10**11},
    "sudo": False,
    "namespaces": "",
    "started": [],
    "ports_taken": [],
    "sandbox": {"isolation": "namespace: all of it", "fault": "", "hint": ""},
    "clock": [0.0, 1.0],
}
SGLANG = Recipe(name="r", hosts=(SPEC,), engines=Engines(kind="sglang", count=1, ranks=8))


def found(
    recipe: Recipe = SGLANG,
    clock: Clock | None = None,
    spec: HostSpec = SPEC,
    mine: set[str] | None = None,
    **changes: Any,
) -> dict[str, Finding]:
    facts = {name: value | changes.get(name, {}) if isinstance(value, dict) else value for name, value in FACTS.items()}
    facts |= {name: value for name, value in changes.items() if not isinstance(value, dict) or FACTS[name] is None}
    findings = list(
        judge(recipe, spec, msgspec.convert(facts, Facts), clock or Clock(offset_s=0.01, error_s=0.02), mine)
    )
    named = {finding.name: finding for finding in findings}
    assert len(named) == len(findings), "a name twice"
    assert all(finding.remedy for finding in findings if finding.state != "ok"), "no remedy"
    return named


def test_a_host_that_lacks_nothing() -> None:
    findings = found()
    assert {finding.state for finding in findings.values()} == {"ok"}
    assert findings["reachable"].detail == "rl at gpu-1: Ubuntu 24.04, kernel 6.8"
    assert findings["GPUs"].detail == "8 of NVIDIA B300 (281 GiB), driver 590.1"
    assert findings["CPUs"].detail.startswith("16 CPUs, 8 cores, 2 sockets, 2 NUMA nodes; serving none; reset ")


def serving(**engines: Any) -> Recipe:
    return Recipe(name="r", hosts=(SPEC,), engines=Engines(**{"kind": "sglang", "count": 1, "ranks": 8} | engines))


DOCKER = Recipe(name="r", hosts=(SPEC,), sandbox=Sandbox(backend="docker"))
KEPT = Recipe(name="r", hosts=(SPEC,), sandbox=Sandbox(serving_cpus="0-99"))


@pytest.mark.parametrize(
    ("recipe", "changes", "name", "state", "says"),
    [
        (SGLANG, {"python": {"fault": "no such program"}}, "python", "fail", "no such program"),
        (SGLANG, {"python": {"version": "3.9.2"}}, "python", "fail", "is 3.9.2"),
        (SGLANG, {"python": {"agentrl": ""}}, "agentrl", "fail", "not installed"),
        (SGLANG, {"python": {"agentrl": "0.0.1"}}, "agentrl", "fail", "0.0.1, here it is"),
        (SGLANG, {"python": {"sglang": ""}}, "engines", "fail", "has no sglang"),
        (SGLANG, {"python": {"sglang": "0.5.19"}}, "engines", "fail", "older than 0.5.20"),
        (SGLANG, {"python": {"sglang": "0.5.21"}}, "engines", "fail", "engines.ranks is 8"),
        (serving(ranks=1), {"python": {"sglang": "0.5.21"}}, "engines", "ok", "without attention DP"),
        (SGLANG, {"python": {"sglang": "0.6.0"}}, "engines", "warn", "newer than what was tested"),
        (SGLANG, {"python": {"sglang": "0.5.23.post1+cu130"}}, "engines", "ok", "0.5.23.post1+cu130"),
        (SGLANG, {"engines_python": PYTHON | {"sglang": "", "torch": "2"}}, "engines", "fail", "/venv/python has no"),
        (serving(kind="embedded"), {"python": {"torch": ""}}, "engines", "fail", "has no torch"),
        (SGLANG, {"gpus": {"gpus": [], "fault": "no nvidia-smi"}}, "GPUs", "fail", "none (no nvidia-smi)"),
        (SGLANG, {"gpus": {"gpus": [GPU] * 4}}, "GPUs", "fail", "the engines want 8"),
        (serving(ranks=4, gpus=8, count=2), {}, "GPUs", "fail", "the engines want 16"),
        (serving(gpu_gb=288), {}, "GPUs", "ok", "B300"),
        (serving(gpu_gb=288), {"gpus": {"gpus": [GPU | {"memory_mb": 183_000}] * 8}}, "GPUs", "fail", "of 192 GB"),
        (SGLANG, {"gpus": {"gpus": [GPU | {"used_mb": 90_000}] * 8}}, "GPUs", "warn", "is in use"),
        (serving(args=("--device", "cpu")), {"gpus": {"gpus": [], "fault": "-"}}, "GPUs", "ok", "none needed"),
        (serving(base_port=9000), {"ports_taken": [9000]}, "ports", "fail", "taken: 9000"),
        (SGLANG, {"namespaces": "unshare: denied", "sandbox": {"fault": "x"}}, "sandboxes", "fail", "rl may not make"),
        (SGLANG, {"sandbox": {"fault": "no tmpfs", "hint": "mount it"}}, "sandboxes", "fail", "no tmpfs"),
        (DOCKER, {"docker": {"fault": "no one"}, "sandbox": {"fault": "x"}}, "sandboxes", "fail", "docker: no one"),
        (SGLANG, {"docker": {"version": "", "fault": "no engine"}}, "docker", "ok", "not needed; no engine"),
        (SGLANG, {"disk": {"free": 10**6}}, "disk", "fail", "are wanted"),
        (SGLANG, {"disk": {"fault": "No space left on device"}}, "disk", "fail", "No space left"),
        (KEPT, {}, "CPUs", "fail", "not among this host's usable CPUs"),
        (SGLANG, {"cpus": {"usable": [[0, 0, 0]], "sockets": 1}}, "CPUs", "warn", "1 CPUs"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(recipe: Recipe, changes: dict[str, Any], name: str, state: str, says: str) -> None:
    findings = found(recipe, **changes)
    assert (findings[name].state, says in findings[name].detail) == (state, True), findings[name]
    others = {n for n, finding in findings.items() if finding.state == "fail" and n != name}
    assert others <= {"sandboxes"}, others


@pytest.mark.parametrize(("weights", "state"), [("copy", "fail"), ("auto", "warn"), ("shared", "ok")])
def test_room_for_weights_is_needed_where_they_are_copied(weights: Any, state: str) -> None:
    spec = HostSpec(name="h1", weights=weights)
    recipe = Recipe(name="r", hosts=(spec,), engines=SGLANG.engines)
    assert found(recipe, spec=spec, disk={"free": 201 << 20})["disk"].state == state


def test_what_does_not_run_there_is_not_asked_for() -> None:
    engines_only = HostSpec(name="h1", roles=("engines",))
    recipe = Recipe(name="r", hosts=(engines_only, HostSpec(name="h2", roles=("sandbox",))), engines=SGLANG.engines)
    assert "sandboxes" not in found(recipe, spec=engines_only, namespaces="denied")
    assert found(recipe, spec=recipe.hosts[1], gpus={"gpus": [], "fault": "-"})["GPUs"].state == "ok"


@given(offset=st.floats(-1e4, 1e4), there=st.floats(0, 10), back=st.floats(0, 10), work=st.floats(0, 10))
def test_an_offset_is_within_its_error(offset: float, there: float, back: float, work: float) -> None:
    clock = between(100.0, 100.0 + there + offset, 100.0 + there + work + offset, 100.0 + there + work + back)
    assert abs(clock.offset_s - offset) <= clock.error_s + 1e-9


@pytest.mark.parametrize(("offset", "error", "state"), [(5.0, 0.1, "warn"), (-5.0, 0.1, "warn"), (5.0, 4.5, "ok")])
def test_a_clock_is_off_only_where_that_is_sure(offset: float, error: float, state: str) -> None:
    assert found(clock=Clock(offset_s=offset, error_s=error))["clock"].state == state


def test_a_host_that_another_run_uses() -> None:
    engines = {"run": "other-1-h1", "role": "engines", "pid": 7, "user": "ann"}
    boxes = engines | {"role": "sandbox"}
    assert found(started=[engines])["in use"].state == "warn"  # nothing is to be started
    assert found(started=[engines], mine={"r-1-h1"})["in use"].state == "fail"
    said = found(started=[engines, boxes], mine={"r-1-h1"})["in use"].detail
    assert said == "; ".join(f"other-1-h1 has its {role} there (process 7 of ann)" for role in ("engines", "sandbox"))
    assert found(started=[engines | {"run": "r-1-h1"}], mine={"r-1-h1"})["in use"].state == "ok"  # a leftover of ours
    sandboxes = HostSpec(name="h1", roles=("sandbox",))
    assert found(started=[engines], mine={"r-1-h1"}, spec=sandboxes)["in use"].state == "ok"
    attaching = serving(attach=("http://127.0.0.1:1",))
    assert found(attaching, started=[engines], mine={"r-1-h1"})["in use"].state == "ok"


class Posing:
    """A host that answers as told."""

    name, python, home = "h1", "/venv/python", "/home/rl/.agentrl"

    def __init__(self, answer: tuple[int, str] | Exception, skew_s: float = 0.0) -> None:
        self._answer = answer
        self._skew_s = skew_s

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> tuple[int, str]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer if stdin else (0, f"{time.time() + self._skew_s}\n")


def sites(host: Posing) -> Sites:
    return {"h1": Site(host, "/home/rl/.agentrl/runs/r-1234-h1", SPEC)}  # type: ignore[arg-type]


def test_a_clock_is_asked_more_than_once() -> None:
    """The probe takes long to start, so its own times say little; the skew is found all the same."""
    slow = FACTS | {"clock": [time.time() - 1000, time.time() - 1000]}
    host = Posing((0, "motd\n" + msgspec.json.encode(slow).decode() + "\n"), skew_s=-5.0)
    facts, clock = asyncio.run(survey(host, Ask(python="", home="")))  # type: ignore[arg-type]
    assert abs(clock.offset_s + 5.0) <= clock.error_s < 1.0
    assert facts.who.machine == "gpu-1"


POOR = msgspec.json.encode(
    FACTS | {"disk": FACTS["disk"] | {"free": 1}, "gpus": {"driver": "", "gpus": [], "fault": "x"}}
).decode()


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        ((127, ""), UnavailableError, "h1: no Python there"),
        ((1, "Traceback\nboom"), UnavailableError, "the probe ended with 1: Traceback\nboom"),
        (UnavailableError("h1: permission denied", hint="the key"), UnavailableError, "permission denied"),
        (UserError("h1: its host key has changed", hint="mend it"), UserError, "host key has changed"),
        (DeadlineError("h1: silent"), UnavailableError, "silent"),
        ((0, POOR), UnavailableError, "h1: GPUs: none (x), the engines want 8 (and 1 more"),
    ],
)  # fmt: skip
def test_one_error_before_anything_is_started(answer: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as raised:
        asyncio.run(require(SGLANG, sites(Posing(answer))))
    assert says in str(raised.value)


def test_only_what_is_started_is_required() -> None:
    """`sandbox up` needs no GPU, `serve up` no sandboxes."""
    poor = msgspec.json.encode(FACTS | {"gpus": {"driver": "", "gpus": [], "fault": "x"}}).decode()
    asyncio.run(require(SGLANG, sites(Posing((0, poor))), roles=("sandbox",)))
    full = msgspec.json.encode(FACTS | {"sandbox": {"isolation": "", "fault": "no", "hint": "-"}}).decode()
    asyncio.run(require(SGLANG, sites(Posing((0, full))), roles=("engines",)))
    with pytest.raises(UnavailableError, match="sandboxes: no"):
        asyncio.run(require(SGLANG, sites(Posing((0, full))), roles=("sandbox",)))


def test_nothing_wrong_raises_nothing() -> None:
    answer = msgspec.json.encode(FACTS).decode()
    asyncio.run(require(SGLANG, sites(Posing((0, answer)))))


def test_the_probe_is_asked_for_what_runs_there() -> None:
    host: Any = Posing((0, ""))
    recipe = Recipe(
        name="r",
        hosts=(HostSpec(name="h0", roles=("engines",)), HostSpec(name="h1")),
        engines=Engines(kind="sglang", count=3, base_port=9000, python="/sglang/python"),
    )
    assert ask_of(recipe, recipe.hosts[0], host).sandbox is None
    asked = ask_of(recipe, recipe.hosts[1], host)
    assert (asked.ports, asked.engines_python) == ((9002,), "/sglang/python")
    assert asked.sandbox["backend"] == "namespace"
    assert msgspec.json.decode(msgspec.json.encode(asked.sandbox), type=Sandbox) == recipe.sandbox
