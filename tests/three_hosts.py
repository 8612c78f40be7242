"""A run over three machines behind SSH, for tests of it: recipes/three-hosts.toml, or what a test makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from agentrl.wiring.attach import FaceClient, LiveRun
from tests.hosts import Network

RECIPE = Path(__file__).parents[1] / "recipes" / "three-hosts.toml"
STARTED: list[Run] = []
_BARE = ("unshare", "sh", "sshd", "sshd-session")  # what runs on a machine that nobody uses
ENDLESS = "steps=10000"  # for `Run.drained`
SMALL = ["batch.groups=2", "batch.siblings=2", "window.groups=4", "window.attempts=8", "engines.slots=8"]


@contextlib.contextmanager
def three_hosts() -> Iterator[Network]:
    """h1, h2 and h3, running; what `Run` started and did not end ends with them."""
    with Network() as network:
        for name in ("h1", "h2", "h3"):
            network.add(name)
        yield network
        for run in STARTED:
            run.process.kill()  # of a test that failed
            run.process.wait()
        STARTED.clear()


def command(network: Network, *argv: str, overrides: Sequence[str] = ()) -> list[str]:
    """Of the command line; interpreters there are this one."""
    pythons = [f"hosts.{name}.python={sys.executable}" for name in network.machines]
    sets = [word for override in (*SMALL, *pythons, *overrides) for word in ("--set", override)]
    return [sys.executable, "-m", "agentrl.cli.main", *argv, *sets]


def agentrl(network: Network, cwd: Path, *argv: str) -> Any:
    """What it printed as JSON; as a user whose ~/.ssh knows the machines."""
    verb = command(network, *argv, "--json") if str(RECIPE) in argv else [*command(network)[:3], *argv, "--json"]
    env = {**os.environ, **network.env}
    done = subprocess.run(verb, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Run:
    """`agentrl run` of the recipe, as a user whose ~/.ssh knows the machines."""

    def __init__(self, network: Network, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.machines = network.machines
        folder.mkdir(parents=True, exist_ok=True)
        argv = command(network, "run", str(RECIPE), "--run-dir", str(folder), "--quiet", overrides=overrides)
        self._said = folder / "said"
        STARTED.append(self)
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={**os.environ, **network.env}
            )

    async def ended(self) -> dict[str, Any]:
        """Its summary."""
        code = await asyncio.to_thread(self.process.wait)
        assert code == 0, self.said
        return json.loads((self.folder / "summary.json").read_text())

    async def drained(self) -> dict[str, Any]:
        """Its summary, after it was asked for an end: when, is what it must live to see, not how fast it is."""
        self.process.send_signal(signal.SIGINT)
        code = await asyncio.to_thread(self.process.wait)
        assert code == 130, self.said
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        assert (summary["outcome"], summary["ledger_balanced"]) == ("drained", True)
        return summary

    @property
    def said(self) -> str:
        return self._said.read_text()

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """As they happen, from when it can be asked."""
        while not (self.folder / "url").exists():
            assert self.process.poll() is None, self.said
            await asyncio.sleep(0.05)
        url, token = ((self.folder / name).read_text().strip() for name in ("url", "token"))
        async with FaceClient(LiveRun(folder=str(self.folder), url=url, token=token)) as face:
            try:
                yield (said["event"] async for said in face.events() if said)
            except AssertionError as exc:
                raise AssertionError(f"{exc}\n{self.said}") from exc

    @property
    def label(self) -> str:
        """What all that it starts elsewhere is marked with."""
        [folder] = {path.name.removesuffix("-h2") for path in (self.machines["h2"].home / ".agentrl/runs").iterdir()}
        return folder


def left(network: Network, label: str) -> list[str]:
    """What is left of it anywhere. A dying process is given a moment: the kernel has no event for "nothing"."""
    ends = time.monotonic() + 15.0
    while (found := list(_left(network, label))) and time.monotonic() < ends:
        time.sleep(0.1)
    return found


def _left(network: Network, label: str) -> Iterator[str]:
    for process in psutil.process_iter(["cmdline", "pid", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if label in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield f"process {process.info['pid']}: {line[:120]}"
    for root, folders, _ in os.walk("/sys/fs/cgroup"):
        yield from (f"cgroup {root}/{name}" for name in folders if label in name)
    for machine in network.machines.values():
        strange = [process for process in machine.processes() if process.name() not in _BARE]
        yield from (f"{machine.name} process {process.pid}: {process.name()}" for process in strange)
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
