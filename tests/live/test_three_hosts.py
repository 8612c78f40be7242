"""recipes/three-hosts.toml over real sshd, each machine in namespaces of its own: engines on h1 and h2, sandboxes on h2
and h3, the controller and the trainer here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from agentrl.publish.store import DiskWeightStore
from agentrl.records import Version
from agentrl.serve.sglang import SGLangEngine
from tests.engines import ask
from tests.hosts import Network
from tests.live.chaos import Report, account, turns_of
from tests.three_hosts import ENDLESS, RECIPE, Run, agentrl, first, good, host_event, left, stepped, three_hosts

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


@pytest.fixture
def network() -> Iterator[Network]:
    with three_hosts() as network:
        yield network


def test_a_run_over_three_hosts_leaves_nothing(network: Network, tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(network, tmp_path / "run", "steps=1")
        async with run.events() as events:
            await first(events, lambda event: event["type"] == "EngineUp")
            label = run.label
            loaded = set()
            async for event in events:
                if event["type"] == "EngineLoaded":
                    loaded.add((event["engine"], event["version"]))
        assert loaded == {("e0", 1), ("e1", 1)}
        good(await run.ended(), 1)
        assert left(network, label) == []
        logs = sorted(str(path.relative_to(run.folder / "logs")) for path in (run.folder / "logs").rglob("h*/*.log"))
        assert logs == ["h1/e0.log", "h2/e1.log", "h2/sandbox.log", "h3/sandbox.log"]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_link_that_is_cut_for_a_while_loses_nothing(network: Network, tmp_path: Path) -> None:
    """Named soon, moved, resumed; the engine there is found again with what it held."""

    async def scenario() -> None:
        run = Run(network, tmp_path / "run", ENDLESS, "batch.siblings=4")
        async with run.events() as events:
            await first(events, stepped(2))
            label, acknowledged = run.label, turns_of(run.folder / "run.sqlite")
            network.machines["h2"].cut()
            cut = time.monotonic()
            await first(events, host_event("Down", "h2"))
            named_s = time.monotonic() - cut
            await asyncio.sleep(20 - named_s)  # how long it lasts is the case
            network.machines["h2"].mend()
            mended = time.monotonic()
            await first(events, host_event("Up", "h2"))
            back_s = time.monotonic() - mended
        await run.drained()
        report = Report()
        account(report, acknowledged, run.folder)
        print(
            f"\nh2 is named {named_s:.1f} s after the cut, its sandboxes serve {back_s:.1f} s after its end;"
            f" {report.acknowledged} turns were acknowledged: {report.found} found, {report.dropped} in dropped groups"
        )
        assert report.lost == []
        assert "e1 on h2 is found again" in (run.folder / "logs" / "run.log").read_text()
        assert left(network, label) == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_host_that_is_lost_for_good_costs_no_batch(network: Network, tmp_path: Path) -> None:
    """What it ran ends there by itself, when its lease does; the run's folder goes when somebody collects."""

    async def scenario() -> str:
        run = Run(network, tmp_path / "run", ENDLESS, "hosts.h2.lease_s=5")
        async with run.events() as events:
            await first(events, stepped(1))
            label = run.label
            network.machines["h2"].cut()
            down = await first(events, host_event("Down", "h2"))
            assert "h2" in down["reason"]
            await first(events, stepped(1))
            await first(events, stepped(1))  # one that was begun without h2
        await run.drained()
        assert f"h2: /home/h2/.agentrl/runs/{label}-h2 is left there" in (run.folder / "logs" / "run.log").read_text()
        return label

    label = asyncio.run(scenario())
    remains = left(network, label)
    assert remains
    assert all(line.startswith("h2 /") for line in remains), remains  # files, which nobody could reach
    network.machines["h2"].mend()
    for path in (network.machines["h2"].home / ".agentrl" / "runs").rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    assert agentrl(network, tmp_path, "sandbox", "gc", str(RECIPE)) == {"removed": 0}


@pytest.mark.slow
def test_a_controller_that_is_killed_leaves_nothing_and_is_resumed(network: Network, tmp_path: Path) -> None:
    async def scenario() -> None:
        leases = [f"hosts.{name}.lease_s=5" for name in network.machines]
        run = Run(network, tmp_path / "run", ENDLESS, *leases)
        async with run.events() as events:
            await first(events, stepped(2))
            label = run.label
        run.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(run.process.wait)
        (run.folder / "url").unlink()
        again = Run(network, tmp_path / "run", ENDLESS, *leases)  # at once: what was left is ended by who follows
        async with again.events() as events:
            await first(events, stepped(4))
        await again.drained()
        assert left(network, label) == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_two_runs_share_hosts_in_different_roles(network: Network, tmp_path: Path) -> None:
    """A third that wants what one of them has is refused before anything starts."""

    async def scenario() -> None:
        crossed = ['hosts.h1.roles=["sandbox"]', 'hosts.h2.roles=["sandbox"]', 'hosts.h3.roles=["engines"]']
        straight = ['hosts.h1.roles=["engines"]', 'hosts.h2.roles=["engines"]', 'hosts.h3.roles=["sandbox"]']
        one = Run(network, tmp_path / "one", ENDLESS, *straight)
        async with one.events() as events:
            await first(events, stepped(1))
            third = Run(network, tmp_path / "third", "steps=1", *straight)
            two = Run(network, tmp_path / "two", "steps=2", "seed=1", *crossed)
            assert await asyncio.to_thread(third.process.wait) == 3
            assert "h1: in use: three-hosts-" in third.said
        good(await two.ended(), 2)
        await one.drained()
        assert left(network, "three-hosts-") == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_services_over_hosts_take_versions_alike(network: Network, tmp_path: Path) -> None:
    """Engines that `serve up` started: a version gets to both, checksums are equal, greedy sampling agrees; then a run
    on them and on daemons of `sandbox up`; then nothing."""
    recipe, runs = str(RECIPE), tmp_path / "runs" / "made"
    up = agentrl(network, tmp_path, "serve", "up", recipe)
    assert [(part["name"], part["host"]) for part in up["parts"]] == [("e0", "h1"), ("e1", "h2")]
    make_version(runs, Path(up["folder"]) / "weights" / "v000000")
    pushed = agentrl(network, tmp_path, "publish", str(runs))["pushed"]
    assert {(each["before"], each["version"]) for each in pushed} == {(0, 1)}
    assert len({each["checksum"] for each in pushed}) == 1
    assert pushed[0]["checksum"]
    token = Path(up["token_file"]).read_text().strip()
    assert len({asyncio.run(greedy(part["url"], token)) for part in up["parts"]}) == 1
    daemons = agentrl(network, tmp_path, "sandbox", "up", recipe)
    assert [part["host"] for part in daemons["parts"]] == ["h2", "h3"]
    urls = json.dumps([part["url"] for part in up["parts"]])
    run = Run(
        network,
        tmp_path / "run",
        "steps=1",
        f"engines.attach={urls}",
        f"engines.token_file={up['token_file']}",
        f"sandbox.attach={daemons['folder']}",
    )
    good(asyncio.run(run.ended()), 1)
    reports = agentrl(network, tmp_path, "serve", "status", recipe)["engines"]
    assert [(each["host"], each["serves"], each["version"]) for each in reports] == [("h1", True, 1), ("h2", True, 1)]
    for kind in ("sandbox", "serve"):
        assert agentrl(network, tmp_path, kind, "down", recipe)["stopped"]
    assert left(network, "three-hosts-") == []


def make_version(folder: Path, initial: Path) -> None:
    """A run's folder with version 1: the initial policy, a little off."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE.read_text())
    store = DiskWeightStore(str(folder / "weights"))
    store.adopt(str(initial))
    tensors = load_file(initial / "model.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in tensors.items()}
    store.put(Version(1), lambda to: save_file(changed, Path(to, "model.safetensors"), metadata={"format": "pt"}))


async def greedy(url: str, token: str) -> tuple[int, ...]:
    engine = SGLangEngine("probe", url, token)
    try:
        reply = await ask(engine, [5, 6, 7, 8, 9], 32, temperature=1e-6)
        assert [span.version for span in reply.spans] == [1]
        return tuple(reply.tokens)
    finally:
        await engine.aclose()
