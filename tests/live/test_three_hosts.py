"""recipes/three-hosts.toml over real sshd, each machine in namespaces of its own: engines on h1 and h2, sandboxes on h2
and h3, the controller and the trainer here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.wiring.attach import FaceClient, LiveRun
from tests.hosts import Network
from tests.live.chaos import Report, account, turns_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

RECIPE = Path(__file__).parents[2] / "recipes" / "three-hosts.toml"
SMALL = ["batch.groups=2", "batch.siblings=2", "window.groups=4", "window.attempts=8", "engines.slots=8"]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        for name in ("h1", "h2", "h3"):
            network.add(name)
        yield network


class Run:
    """`agentrl run` of the recipe, as a user whose ~/.ssh knows the machines."""

    def __init__(self, network: Network, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.machines = network.machines
        folder.mkdir(parents=True, exist_ok=True)
        pythons = [f"hosts.{name}.python={sys.executable}" for name in network.machines]
        argv = [sys.executable, "-m", "agentrl.cli.main", "run", str(RECIPE), "--run-dir", str(folder), "--quiet"]
        for override in (*SMALL, *pythons, *overrides):
            argv += ["--set", override]
        self._said = folder / "said"
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={**os.environ, **network.env}
            )

    async def ended(self) -> dict[str, Any]:
        """Its summary."""
        code = await asyncio.to_thread(self.process.wait)
        assert code == 0, self._said.read_text()
        return json.loads((self.folder / "summary.json").read_text())

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """As they happen, from when it can be asked."""
        while not (self.folder / "url").exists():
            assert self.process.poll() is None, self._said.read_text()
            await asyncio.sleep(0.05)
        url, token = ((self.folder / name).read_text().strip() for name in ("url", "token"))
        async with FaceClient(LiveRun(folder=str(self.folder), url=url, token=token)) as face:
            yield (said["event"] async for said in face.events() if said)

    @property
    def label(self) -> str:
        """What all that it starts elsewhere is marked with."""
        [folder] = {path.name.removesuffix("-h2") for path in (self.machines["h2"].home / ".agentrl/runs").iterdir()}
        return folder

    def left(self, label: str) -> list[str]:
        """What is left of it anywhere. A dying process is given a moment: the kernel has no event for "nothing"."""
        ends = time.monotonic() + 15.0
        while (found := list(self._left(label))) and time.monotonic() < ends:
            time.sleep(0.1)
        return found

    def _left(self, label: str) -> Iterator[str]:
        for process in psutil.process_iter(["cmdline", "pid", "status"]):
            line = " ".join(process.info["cmdline"] or [])
            if label in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield f"process {process.info['pid']}: {line[:120]}"
        for root, folders, _ in os.walk("/sys/fs/cgroup"):
            yield from (f"cgroup {root}/{name}" for name in folders if label in name)
        for machine in self.machines.values():
            mounts = Path(f"/proc/{machine.pid}/mounts")
            yield from (f"{machine.name} mount {line}" for line in mounts.read_text().splitlines() if label in line)
            folders_of = [machine.home / ".agentrl" / name for name in ("runs", "processes")]
            yield from (f"{machine.name} {path}" for folder in folders_of for path in folder.glob("*"))
            yield from (f"{machine.name} {path}" for path in machine.path("/tmp").glob("agentrl-*.sock"))


async def first(events: AsyncIterator[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async for event in events:
        if wanted(event):
            return event
    raise AssertionError("the run was over before")


def stepped(version: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["type"] == "StepFinished" and event["version"] >= version


def host_event(kind: str, host: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["type"] == f"SandboxHost{kind}" and event["host"] == host


def good(summary: dict[str, Any], steps: int) -> None:
    assert (summary["outcome"], summary["ledger_balanced"], len(summary["steps"])) == ("done", True, steps)


def test_a_run_over_three_hosts_leaves_nothing(network: Network, tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(network, tmp_path / "run", "steps=2")
        async with run.events() as events:
            await first(events, lambda event: event["type"] == "EngineUp")
            label = run.label
            async for event in events:
                if event["type"] == "EngineLoaded" and event["version"] == 2:
                    break
        good(await run.ended(), 2)
        assert run.left(label) == []
        logs = sorted(str(path.relative_to(run.folder / "logs")) for path in (run.folder / "logs").rglob("h*/*.log"))
        assert logs == ["h1/e0.log", "h2/e1.log", "h2/sandbox.log", "h3/sandbox.log"]

    asyncio.run(scenario())


def test_a_link_that_is_cut_for_a_while_loses_nothing(network: Network, tmp_path: Path) -> None:
    """Named soon, moved, resumed; the engine there is found again with what it held."""

    async def scenario() -> None:
        run = Run(network, tmp_path / "run", "steps=12", "batch.siblings=4")
        async with run.events() as events:
            await first(events, stepped(2))
            label, acknowledged = run.label, turns_of(run.folder / "run.sqlite")
            network.machines["h2"].cut()
            cut = time.monotonic()
            await first(events, host_event("Down", "h2"))
            print(f"\nh2 is named {time.monotonic() - cut:.1f} s after the cut")
            await asyncio.sleep(20 - (time.monotonic() - cut))  # how long it lasts is the case
            network.machines["h2"].mend()
            mended = time.monotonic()
            await first(events, host_event("Up", "h2"))
            print(f"its sandboxes serve {time.monotonic() - mended:.1f} s after it is back")
        summary = await run.ended()
        good(summary, 12)
        report = Report()
        account(report, acknowledged, run.folder)
        print(f"{report.acknowledged} turns acknowledged at the cut: {report.found} found, {report.dropped} dropped")
        assert report.lost == []
        assert "e1 on h2 is found again" in (run.folder / "logs" / "run.log").read_text()
        assert run.left(label) == []

    asyncio.run(scenario())


def test_a_host_that_is_lost_for_good_costs_no_batch(network: Network, tmp_path: Path) -> None:
    """And what it ran ends there by itself, when its lease does."""

    async def scenario() -> None:
        run = Run(network, tmp_path / "run", "steps=6", "hosts.h2.lease_s=5")
        h2 = network.machines["h2"]
        async with run.events() as events:
            await first(events, stepped(1))
            label = run.label
            h2.cut()
            down = await first(events, host_event("Down", "h2"))
            assert "h2" in down["reason"]
        good(await run.ended(), 6)
        assert "h2" in (run.folder / "logs" / "run.log").read_text()
        left = run.left(label)
        assert all(line.startswith("h2 /") for line in left), left  # files: nobody could reach them
        h2.mend()

    asyncio.run(scenario())


def test_two_runs_share_the_hosts(network: Network, tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Run(network, tmp_path / "one", "steps=2")
        two = Run(network, tmp_path / "two", "steps=2", "seed=1")
        for summary in await asyncio.gather(one.ended(), two.ended()):
            good(summary, 2)
        assert one.left("three-hosts-") == []

    asyncio.run(scenario())
