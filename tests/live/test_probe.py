"""The probe on this machine, posing as the hosts of an inventory: what it says is so, and it leaves nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import agentrl
from agentrl.errors import UnavailableError
from agentrl.hosts.inventory import Site
from agentrl.hosts.local import LocalHost
from agentrl.hosts.survey import Ask, Facts, survey
from agentrl.recipe.load import load
from agentrl.recipe.schema import HostSpec, Recipe
from agentrl.wiring.findings import Finding
from agentrl.wiring.preflight import examine_host, examine_inventory, require
from tests.cli import RECIPE, left_behind

pytestmark = pytest.mark.live


def recipe_on(*names: str, home: str = "") -> Recipe:
    hosts = tuple(HostSpec(name=name, address="local", home=home) for name in names)
    return msgspec.structs.replace(load(RECIPE), hosts=hosts)


def another(folder: Path, *, ours: str = "", sglang: str = "") -> str:
    """An interpreter of its own, which has these versions of agentrl and SGLang."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    [packages] = folder.glob("lib/python*/site-packages")
    if ours:
        (packages / "agentrl").mkdir()
        (packages / "agentrl" / "__init__.py").write_text(f'__version__ = "{ours}"\n')
    if sglang:
        (packages / f"sglang-{sglang}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {sglang}\n"
        (packages / f"sglang-{sglang}.dist-info" / "METADATA").write_text(metadata)
    return str(folder / "bin" / "python")


def facts(host: LocalHost, **asked: object) -> Facts:
    return asyncio.run(survey(host, Ask(python=host.python, home=host.home, **asked)))[0]  # type: ignore[arg-type]


def test_two_hosts_side_by_side(tmp_path: Path) -> None:
    recipe = recipe_on("h1", "h2", home=str(tmp_path / "home"))
    findings = asyncio.run(examine_inventory(recipe))
    assert [f for f in findings if f.state == "fail"] == []
    told = {name: [f.name for f in findings if f.host == name] for name in ("h1", "h2")}
    assert told["h1"] == told["h2"]
    assert {"reachable", "agentrl", "engines", "sandboxes", "disk", "clock"} <= set(told["h1"])
    [said] = [f.detail for f in findings if (f.host, f.name) == ("h2", "agentrl")]
    assert said == f"{agentrl.__version__}, as here"
    [contained] = [f.detail for f in findings if (f.host, f.name) == ("h1", "sandboxes")]
    assert contained.startswith("namespace: ")
    assert left_behind(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_the_probe_says_is_so(tmp_path: Path) -> None:
    host = LocalHost(home=str(tmp_path / "not" / "there"))
    found = facts(host)
    assert found.who.uid == os.getuid()
    assert (found.python.version, found.python.agentrl) == (
        ".".join(map(str, sys.version_info[:3])),
        agentrl.__version__,
    )
    assert {cpu for cpu, _, _ in found.cpus.usable} == os.sched_getaffinity(0)
    assert (found.disk.path, found.disk.fault) == (str(tmp_path), "")
    assert 0 < found.memory.available < found.memory.total


def test_interpreters_and_what_they_hold(tmp_path: Path) -> None:
    found = facts(LocalHost(python="/nowhere/python"))  # the probe runs all the same
    assert (found.python.fault, found.python.agentrl) == ("no such program", "")
    old = another(tmp_path / "old", ours="0.0.1")
    serving = another(tmp_path / "serving", sglang="0.5.19")
    found = facts(LocalHost(python=old), engines_python=serving)
    assert (found.python.agentrl, found.serving.sglang, found.serving.agentrl) == ("0.0.1", "0.5.19", "")


def refused(recipe: Recipe, host: LocalHost) -> str:
    with pytest.raises(UnavailableError) as raised:
        asyncio.run(require(recipe, {host.name: Site(host, f"{host.home}/runs/r-{host.name}", recipe.hosts[0])}))
    assert raised.value.hint
    return str(raised.value)


def test_another_version_of_agentrl_there(tmp_path: Path) -> None:
    said = refused(recipe_on("h1"), LocalHost("h1", python=another(tmp_path / "old", ours="0.0.1")))
    assert said.startswith(f"h1: agentrl: 0.0.1, here it is {agentrl.__version__}")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip("only root may mount a small file system")
    (disk / "ballast").write_bytes(bytes((1 << 20) - 4096))
    yield disk
    subprocess.run(["umount", disk], check=True, timeout=20)


def test_a_disk_that_is_full_there(full: Path) -> None:
    said = refused(recipe_on("h1"), LocalHost("h1", home=str(full / "agentrl")))
    assert f"free at {full}: cannot be written: No space left on device" in said


def test_a_user_who_may_not_make_namespaces(tmp_path: Path) -> None:
    """Its limit is 0, as an administrator would set it: in a user namespace, which the interpreter enters."""
    limited = tmp_path / "python"
    script = 'echo 0 > /proc/sys/user/max_mnt_namespaces; exec "$0" "$@"'
    enter = f"exec unshare --user --map-current-user --keep-caps sh -c '{script}' {sys.executable}"
    limited.write_text(f'#!/bin/sh\n{enter} "$@"')
    limited.chmod(0o755)
    if subprocess.run([limited, "-c", ""], check=False, capture_output=True).returncode:
        pytest.skip("this kernel lets nobody make a user namespace")
    said = refused(recipe_on("h1"), LocalHost("h1", python=str(limited), home=str(tmp_path)))
    assert "may not make namespaces (a limit below /proc/sys/user/ is reached)" in said


def test_a_host_that_cannot_be_reached_is_one_finding() -> None:
    class Gone(LocalHost):
        async def run(self, argv: object, *, timeout_s: float, stdin: bytes = b"") -> tuple[int, str]:
            raise UnavailableError("h1: no route", hint="plug it in")

    recipe = recipe_on("h1")
    [finding] = asyncio.run(examine_host(recipe, recipe.hosts[0], Gone("h1")))
    assert finding == Finding(name="reachable", state="fail", detail="h1: no route", remedy="plug it in", host="h1")
