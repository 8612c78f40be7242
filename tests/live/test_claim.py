"""A role of a machine is one run's at a time: the first has it until it is gone, however it ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import UnavailableError
from agentrl.hosts import claim
from agentrl.hosts.inventory import Site, clear
from agentrl.hosts.ssh import SshHost
from agentrl.recipe.schema import HostSpec
from tests.hosts import Network

pytestmark = pytest.mark.live

MODULE = [sys.executable, "-m", "agentrl.hosts.claim"]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with Network() as network:
        network.add("h1")
        monkeypatch.setenv("HOME", network.env["HOME"])
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        yield network


def test_the_first_has_it_until_it_is_killed() -> None:
    role, other = f"test-{os.getpid()}", f"test-{os.getpid()}-other"
    first = subprocess.Popen([*MODULE, "/runs/first", role])
    try:
        assert [holder and holder.pid for holder in claim.who("first", [role])] == [first.pid]
        assert subprocess.run([*MODULE, "/runs/second", other, role], check=False).returncode == 1
        [free, taken] = claim.who("second", [other, role])  # at once, though nobody holds the first of them
        assert (free, taken and taken.run) == (None, "first")
    finally:
        first.kill()
        first.wait()
    second = subprocess.Popen([*MODULE, "/runs/second", other, role])
    try:
        assert [holder and holder.pid for holder in claim.who("second", [role, other])] == [second.pid] * 2
    finally:
        second.kill()
        second.wait()


def test_of_two_runs_that_passed_preflight_at_once_one_is_let_in(network: Network, tmp_path: Path) -> None:
    """Both roles against one: whoever binds first. What is another role, or free again, is had."""

    async def scenario() -> None:
        hosts = [await SshHost("h1", python=sys.executable).open() for _ in range(3)]
        one, two, three = (
            Site(host, f"{host.home}/runs/{name}-h1", HostSpec(name="h1"))
            for host, name in zip(hosts, ("one", "two", "three"), strict=True)
        )
        try:
            both = await asyncio.gather(
                one.claim(["engines"]), two.claim(["engines", "sandbox"]), return_exceptions=True
            )
            [said] = [each for each in both if each is not None]
            assert isinstance(said, UnavailableError)
            loser, winner = (one, two) if both[0] is said else (two, one)
            assert f"h1: in use: {Path(winner.run_dir).name} has its engines there (process " in str(said)
            if winner is one:
                await three.claim(["sandbox"])
            await clear({"": winner}, tmp_path)
            await loser.claim(["engines"])
            await clear({"one": one, "two": two, "three": three}, tmp_path)
            assert list((network.machines["h1"].home / ".agentrl").glob("runs/*")) == []
        finally:
            for host in hosts:
                await host.aclose()

    asyncio.run(scenario())
