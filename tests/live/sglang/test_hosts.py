"""Real SGLang on two machines behind SSH, and a run that trains, publishes to both in turn and loses one of them.

Weights go there over SFTP and are read from the disk, or are broadcast across the machines' own addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.hosts.ssh import SshHost
from agentrl.records import Reply
from agentrl.serve.sglang import SGLangEngine
from tests.engines import SGLANG_PYTHON, SGLANG_RECIPE, ask, until
from tests.hosts import Network
from tests.live.sglang.marks import needs_sglang
from tests.three_hosts import ENDLESS, Run, first, left, three_hosts

pytestmark = [*needs_sglang, pytest.mark.slow]

ENGINES = {"e0": "h1", "e1": "h2"}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with three_hosts() as network:
        monkeypatch.setenv("HOME", network.env["HOME"])
        yield network


def sglang_overrides() -> list[str]:
    """The engines of recipes/local-sglang.toml, one on each of two hosts."""
    engines = tomllib.loads(SGLANG_RECIPE.read_text())["engines"]
    engines |= {"count": 2, "slots": 8, "start_timeout_s": 900.0, "python": os.environ[SGLANG_PYTHON]}
    env = engines.pop("env") | {"GLOO_SOCKET_IFNAME": "eth0"}
    sets = [f"engines.{key}={json.dumps(value)}" for key, value in engines.items()]
    return [*sets, *(f"engines.env.{key}={json.dumps(value)}" for key, value in env.items())]


def transfer_overrides(transfer: str, network: Network) -> list[str]:
    if transfer == "disk":
        return []
    return ['publish.transfer="distributed"', 'publish.backend="gloo"', f'publish.address="{network.address}"']


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transfer", ["disk", "distributed"])
def test_two_sglang_engines_take_versions_in_turn_and_one_is_killed(
    transfer: str, network: Network, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = Run(
            network,
            tmp_path / "run",
            ENDLESS,
            *sglang_overrides(),
            *transfer_overrides(transfer, network),
        )
        seen: list[dict[str, Any]] = []
        async with run.events() as events:
            heard = noted(events, seen)
            await first(heard, lambda event: loaded(seen, 1))
            label = run.label
            with stopped(trainer_of(run)):  # no newer version comes meanwhile
                await agree(network, run.folder, 1)
                server(network, "h1").kill()
            down = await first(heard, lambda event: event["type"] == "EngineDown")
            assert down["engine"] == "e0"
            up = await first(heard, lambda event: event["type"] == "EngineUp")
            assert up["engine"] == "e0"
            with stopped(trainer_of(run)):
                await agree(network, run.folder, up["version"])
            await first(heard, lambda event: loaded(seen, up["version"] + 2))
            draining = asyncio.create_task(run.drained())
            async for _ in heard:
                pass
        summary = await draining
        assert [event for event in seen if event["type"] in ("AttemptFailed", "EngineLoadFailed")] == []
        newest = summary["steps"][-1]["version"]
        assert summary["engines"] == dict.fromkeys(ENGINES, newest)
        publications = {each["version"]: each["engines"] for each in summary["publications"]}
        assert {engine["name"] for engine in publications[newest]} == set(ENGINES)
        for version, engines in publications.items():
            print(f"version {version}:", *(f"{e['name']} staged {e['stage_s']:.1f} s," for e in engines), end=" ")
            print(*(f"{e['name']} paused {e['pause_s']:.2f} s" for e in engines), sep=", ")
            assert len({engine["checksum"] for engine in engines}) == 1
            assert all(engine["checksum"] and not engine["lost_tokens"] for engine in engines)
        assert left(network, label) == []

    asyncio.run(scenario())


async def noted(events: AsyncIterator[dict[str, Any]], seen: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        seen.append(event)
        yield event


def loaded(seen: Sequence[dict[str, Any]], version: int) -> bool:
    """Whether both engines have taken this version, or one after it."""
    found = {e["engine"] for e in seen if e["type"] == "EngineLoaded" and e["version"] >= version}
    return found == set(ENGINES)


def trainer_of(run: Run) -> psutil.Process:
    below = psutil.Process(run.process.pid).children(recursive=True)
    [trainer] = [process for process in below if "agentrl.train.worker" in process.cmdline()[1:3]]
    return trainer


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def server(network: Network, host: str) -> psutil.Process:
    """The engine's first process there, which has its command line; what it forks has it too."""
    found = [process for process in network.machines[host].processes() if "sglang.launch_server" in process.cmdline()]
    return min(found, key=lambda process: process.create_time())


@contextlib.asynccontextmanager
async def probes(network: Network, folder: Path) -> AsyncIterator[list[SGLangEngine]]:
    """Clients of the run's engines, on a way of their own through SSH."""
    token = (folder / "token").read_text().strip()
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for name, host in ENGINES.items():
            argv = server(network, host).cmdline()
            machine = SshHost(host)
            stack.push_async_callback(machine.aclose)
            await machine.open()
            url = await machine.reach(f"127.0.0.1:{argv[argv.index('--port') + 1]}")
            found.append(SGLangEngine(name, f"http://{url}", token))
            stack.push_async_callback(found[-1].aclose)
        yield found


async def agree(network: Network, folder: Path, least: int) -> int:
    """Greedy sampling from the same version, at least this one, gives the same tokens on each; the version."""
    replies: list[Reply] = []

    async def same() -> bool:
        for engine in engines:
            await engine.info(deadline_s=10)  # the run swaps behind its back
        replies[:] = [await ask(engine, [5, 6, 7, 8, 9], 24, temperature=1e-6) for engine in engines]
        return len({span.version for reply in replies for span in reply.spans}) == 1

    async with probes(network, folder) as engines:
        await until(same, 60.0)
    version = replies[0].spans[0].version
    assert version >= least
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    return version
