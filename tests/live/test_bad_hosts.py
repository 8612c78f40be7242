"""Everything that can be wrong with a host, tried on `agentrl run` as a user would: one clear error that names the host
and the remedy, before anything is started there. Real sshd, each host with an address of its own."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentrl as package
from agentrl.hosts.ssh import SshHost
from tests.cli import RECIPE, Done, agentrl, left_behind, started
from tests.hosts import Machine, Network
from tests.live.test_examples import eventually
from tests.live.test_probe import another

pytestmark = pytest.mark.live

SMALL = ("batch.groups=1", "batch.siblings=2", "window.groups=2", "engines.slots=8", "engines.count=1")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Network]:
    with Network() as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        yield made
    assert left_behind(tmp_path) == []


def recipe(place: Path, *hosts: str, **keys: Any) -> Path:
    """recipes/local.toml on these hosts. keys: of each of them."""
    keys = {"python": sys.executable} | keys
    rows = "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in keys.items())
    file = place / "recipe.toml"
    file.write_text(RECIPE.read_text() + "".join(f'\n[[hosts]]\nname = "{name}"\n{rows}' for name in hosts))
    return file


def run(place: Path, file: Path, *settings: str) -> Done:
    chosen = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
    return agentrl("run", file, "--run-dir", place / "run", "--quiet", *chosen)


def refused(done: Done, *machines: Machine, says: str, remedy: str, code: int = 3) -> None:
    assert done.code == code, done.err
    lines = done.err.strip().splitlines()
    assert done.err.count("error:") == 1, done.err
    assert says in lines[0], done.err
    assert remedy in " ".join(lines[1:]), done.err
    assert "Traceback" not in done.err
    for machine in machines:
        assert not list(machine.home.glob(".agentrl/*/*")), "something was put there"
        assert [line for line in running(machine) if "agentrl." in line] == []


def running(machine: Machine) -> list[str]:
    """Command lines of what runs there."""
    there, lines = Path(f"/proc/{machine.pid}/ns/net").readlink(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "ns" / "net").readlink() == there:
                lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return lines


# --- the way there ----------------------------------------------------------------------------------------------------


def wrong_key(network: Network, machine: Machine) -> tuple[str, str]:
    (machine.folder / "authorized_keys").write_text("")
    return "host h1 (h1): login refused", "`ssh h1 true` must work without a question"


def unknown(network: Network, machine: Machine) -> tuple[str, str]:
    network.forget(machine)
    return "host h1 (h1): its host key is not in ~/.ssh/known_hosts", "compare and accept it once: `ssh h1`"


def changed(network: Network, machine: Machine) -> tuple[str, str]:
    machine.end()
    machine.new_key(known=False)
    machine.start()
    return "host h1 (h1): its host key is not the one in ~/.ssh/known_hosts", "find out which"


def another_port(network: Network, machine: Machine) -> tuple[str, str]:
    network.configure("Host h1\n  Port 2222")
    return "host h1 (h1): ", "`ssh h1 true` must work"


@pytest.mark.parametrize("spoil", [wrong_key, unknown, changed, another_port])
def test_no_way_there(network: Network, tmp_path: Path, spoil: Callable[[Network, Machine], tuple[str, str]]) -> None:
    says, remedy = spoil(network, network.add("h1"))
    refused(run(tmp_path, recipe(tmp_path, "h1")), says=says, remedy=remedy)


def test_a_name_that_nobody_has(network: Network, tmp_path: Path) -> None:
    refused(run(tmp_path, recipe(tmp_path, "nowhere.invalid")), says="no such address", remedy="hosts.address")


def test_the_doctor_sees_all_of_them_at_once(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is down takes its time-out, here a short one; the others do not wait for it."""
    monkeypatch.setitem(SshHost.__init__.__kwdefaults__, "connect_s", 5.0)
    machines = {name: network.add(name) for name in ("well", "off", "strange")}
    machines["off"].end()
    network.forget(machines["strange"])
    done = agentrl("doctor", recipe(tmp_path, *machines), "--json")
    assert done.code == 3
    told = {name: [check for check in done.document["checks"] if check["host"] == name] for name in ("", *machines)}
    assert {check["state"] for check in told["well"]} <= {"ok", "warn"}
    assert {"agentrl", "sandboxes", "disk", "clock", "in use"} < {check["name"] for check in told["well"]}
    assert [(check["name"], check["state"]) for check in told["off"]] == [("reachable", "fail")]
    assert any(said in told["off"][0]["detail"] for said in ("no answer", "route"))
    assert "known_hosts" in told["strange"][0]["detail"]
    assert all(check["remedy"] for checks in told.values() for check in checks if check["state"] != "ok")
    assert "engines" not in {check["name"] for check in told[""]}
    shown = agentrl("doctor", recipe(tmp_path, "well"))
    assert "\nwell\nok   reachable root at " in shown.out
    assert not list(machines["well"].home.iterdir())


# --- what is there ----------------------------------------------------------------------------------------------------


def interpreter(machine: Machine, **versions: str) -> str:
    """One of its own (tests.live.test_probe.another); its path there."""
    another(machine.home / "venv", **versions)
    return f"/home/{machine.name}/venv/bin/python"


def test_no_agentrl_there(network: Network, tmp_path: Path) -> None:
    machine = network.add("h1")
    file = recipe(tmp_path, "h1", python=interpreter(machine, ours=""))
    refused(run(tmp_path, file), machine, says="h1: agentrl: not installed", remedy="agentrl hosts install")
    file = recipe(tmp_path, "h1", python="")
    refused(run(tmp_path, file), machine, says="h1: python: /home/h1/.agentrl/venv", remedy="agentrl hosts install")


def test_another_version_of_agentrl_there(network: Network, tmp_path: Path) -> None:
    machine = network.add("h1")
    file = recipe(tmp_path, "h1", python=interpreter(machine, ours="0.0.1"))
    refused(run(tmp_path, file), machine, says="h1: agentrl: 0.0.1, here it is", remedy="agentrl hosts install")


def test_an_sglang_that_is_too_old_or_missing(network: Network, tmp_path: Path) -> None:
    machine = network.add("h1")
    sglang = ("engines.kind=sglang", 'engines.args=["--device", "cpu"]')
    file = recipe(tmp_path, "h1", roles=["engines", "sandbox"])
    there = interpreter(machine, ours=package.__version__, sglang="0.5.9")
    old = run(tmp_path, file, *sglang, f"engines.python={there}")
    refused(old, machine, says="1 of sglang 0.5.9 in /home/h1/venv/bin/python: older", remedy="engines.python")
    none = run(tmp_path, file, *sglang)
    refused(none, machine, says="has no sglang", remedy="pip install")


def test_no_docker_there(network: Network, tmp_path: Path) -> None:
    machine = network.add("h1")
    done = run(tmp_path, recipe(tmp_path, "h1"), "sandbox.backend=docker", "sandbox.image=debian")
    refused(done, machine, says="h1: sandboxes: docker: no engine at /var/run/docker.sock", remedy="start it there")


def test_a_full_disk_there(network: Network, tmp_path: Path) -> None:
    machine = network.add("h1", disk="1m")
    ballast = machine.home / "ballast"
    ballast.write_bytes(bytes((1 << 20) - 4096))
    done = run(tmp_path, recipe(tmp_path, "h1"))
    refused(done, says="free at /home/h1: cannot be written: No space left on device", remedy="hosts.home")
    ballast.unlink()
    refused(run(tmp_path, recipe(tmp_path, "h1")), machine, says="are wanted", remedy="free space there")


def test_a_user_who_may_make_no_namespaces(network: Network, tmp_path: Path) -> None:
    """Its limit is 0, in a user namespace which the interpreter there enters."""
    machine = network.add("h1")
    limit = 'echo 0 > /proc/sys/user/max_mnt_namespaces; exec "$0" "$@"'
    enter = f"exec unshare --user --map-current-user --keep-caps sh -c '{limit}' {sys.executable}"
    python = machine.home / "python"
    python.write_text(f'#!/bin/sh\n{enter} "$@"')
    python.chmod(0o755)
    done = run(tmp_path, recipe(tmp_path, "h1", python="/home/h1/python"))
    refused(done, machine, says="h1: sandboxes: root may not make namespaces", remedy="log in as root")


def test_serving_cpus_that_it_has_not(network: Network, tmp_path: Path) -> None:
    machine = network.add("h1")
    done = run(tmp_path, recipe(tmp_path, "h1", serving_cpus="900-903"))
    refused(done, machine, says="h1: CPUs: ", remedy="serving_cpus", code=2)


# --- others -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_runs_on_one_host_at_once(network: Network, tmp_path: Path) -> None:
    """The second is refused while the first is there, and has the host when that is over."""
    machine = network.add("h1")
    file = recipe(tmp_path, "h1")
    settings = [part for setting in SMALL for part in ("--set", setting)]
    with started(tmp_path, "rollout", file, "--run-dir", "first", "--batches", "1000", *settings) as first:
        eventually(lambda: (tmp_path / "first" / "summary.json").read_text())
        second = run(tmp_path, file)
        refused(second, says="h1: in use: local-", remedy="engines.attach")
        assert "has its engines there (process " in second.err
        assert "has its sandbox there (process " in second.err
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
        assert first.returncode == 130
    assert [line for line in running(machine) if "agentrl." in line] == []
    told = agentrl("doctor", file, "--json").document["checks"]
    assert [check["state"] for check in told if check["name"] == "in use"] == ["ok"]
