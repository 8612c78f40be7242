"""`agentrl hosts install`: from wheels, onto a machine that has a Python and no network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import agentrl
from agentrl.hosts.wheels import Target, everything, of, own
from tests.cli import RECIPE
from tests.hosts import Network

pytestmark = pytest.mark.live


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with Network() as network:
        monkeypatch.setenv("HOME", network.env["HOME"])
        yield network


def hosts(*argv: object, expect: int = 0) -> tuple[dict[str, list[dict[str, object]]], str]:
    command = [sys.executable, "-m", "agentrl.cli.main", "hosts", *map(str, argv), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == expect, (done.stdout, done.stderr)
    return msgspec.json.decode(done.stdout), done.stderr


def recipe(folder: Path, *rows: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text("\n".join([RECIPE.read_text(), *(f"[[hosts]]\n{row}" for row in rows), ""]))
    return path


@pytest.mark.slow  # it downloads some forty wheels
def test_install_and_again_and_status(network: Network, tmp_path: Path) -> None:
    h1 = network.add("h1")
    file = recipe(tmp_path, 'name = "h1"\nroles = ["sandbox"]')
    cache, given = tmp_path / "cache", tmp_path / "wheels"
    here = Target(python=sys.version_info[:2], machine=os.uname().machine, glibc=31)
    given.mkdir()
    for each in everything(cache, own(cache), [], here):
        (given / each.name).symlink_to(each)
    before, _ = hosts("status", file)
    assert before["hosts"][0]["agentrl"] == ""
    told, _ = hosts("install", file, "--wheels", given)
    [done] = told["installed"]
    assert (done["version"], done["changed"]) == (agentrl.__version__, True)
    python = str(done["python"])
    enter = ("nsenter", "--target", str(h1.pid), "--net", "--mount", "env", "-i", "HOME=/home/h1", python, "-I", "-m")
    help_there = subprocess.run([*enter, "agentrl.cli.main", "--help"], check=True, capture_output=True, text=True)
    assert "trainer" in help_there.stdout
    told, _ = hosts("install", file, "--wheels", given)
    assert told["installed"][0]["changed"] is False
    (wheel, *_) = (h1.home / ".agentrl" / "wheels").glob("rich-*.whl")
    wheel.write_bytes(b"damaged")
    (h1.home / ".agentrl" / "wheels" / "stray-1-py3-none-any.whl").touch()
    (h1.home / ".agentrl" / "venv" / "installed.json").unlink()
    told, _ = hosts("install", file, "--wheels", given)
    assert told["installed"][0]["sent"] == 1
    assert not list(wheel.parent.glob("stray*"))
    after, _ = hosts("status", file)
    assert (after["hosts"][0]["agentrl"], after["hosts"][0]["current"]) == (agentrl.__version__, True)


@pytest.mark.slow
def test_wheels_that_lack_something_are_one_clear_error(network: Network, tmp_path: Path) -> None:
    """Also: one host that fails does not stop the others, and an interpreter of the user's own is left alone."""
    network.add("h1")
    file = recipe(tmp_path, 'name = "h1"\nroles = ["sandbox"]', 'name = "h2"\npython = "/opt/python"')
    empty = tmp_path / "wheels"
    empty.mkdir()
    told, said = hosts("install", file, "--wheels", empty, expect=2)
    assert "no wheel of agentrl" in str(told["failed"][0])
    assert "/opt/python, which is left alone" in str(told["failed"][1])
    assert said.count("error:") == 2
    wheel = own(tmp_path / "cache")
    (empty / wheel.name).write_bytes(wheel.read_bytes())
    told, _ = hosts("install", file, "--wheels", empty, expect=3)
    fault = str(told["failed"][0]["fault"])
    assert "host h1" in fault
    assert "No matching distribution found for" in fault


def test_our_own_wheel_is_built_once(tmp_path: Path) -> None:
    first = own(tmp_path)
    written = first.stat().st_mtime_ns
    assert own(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    names = zipfile.ZipFile(first).namelist()
    assert "agentrl/hosts/guard.py" in names
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]
    assert [each.name for each in tmp_path.iterdir()] == [first.parent.name]


def test_platform_tags_are_those_of_the_libc() -> None:
    tags = Target(python=(3, 12), machine="aarch64", glibc=17).platforms
    assert tags[0] == "manylinux_2_17_aarch64"
    assert "manylinux2014_aarch64" in tags
    assert "manylinux_2_18_aarch64" not in tags
    assert "manylinux2014_x86_64" not in Target(python=(3, 12), machine="x86_64", glibc=12).platforms


def test_a_project_is_found_among_wheels() -> None:
    wheels = [
        Path("pip_tools-1-py3-none-any.whl"),
        Path("pip-25-py3-none-any.whl"),
        Path("agentrl-0.1.0-py3-none-any.whl"),
    ]
    assert of("pip", wheels) == wheels[1]
    assert of("torch", wheels) is None
