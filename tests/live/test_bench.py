"""The live benches on real engines, sandboxes and a real trainer."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from agentrl.bench.live import play
from agentrl.recipe.load import load
from agentrl.wiring import Trial
from tests.cli import left_behind, ran, started, until

pytestmark = pytest.mark.live

FILE = Path(__file__).parents[2] / "recipes" / "bench-local.toml"
SMALL = ("steps=4", "batch.groups=1", "batch.siblings=2", "window.groups=2", "tasks.tests_wait_s=0")


def test_an_arm_is_a_run_of_its_own_without_what_it_does_without(tmp_path: Path) -> None:
    """Calls scattered, one pool, and a trainer that trains for nobody."""
    recipe = load(FILE, overrides=[*SMALL, "engines.count=1"])
    arm = play.Arm(name="bare", recipe=recipe, trial=Trial(weights="unpublished", per_request=True, pooled=True))
    lines: list[str] = []
    runs, _ = play.play_all([arm], 1, tmp_path, lambda *told: None, lines.append)
    [run] = runs["bare"]
    assert len(lines) == 1
    assert left_behind(tmp_path) == []
    assert len(run["intervals_s"]) == 2
    assert run["cpu_s"].keys() == {"engines", "sandboxes", "trainer", "controller"}
    assert run["cpu_s"]["trainer"] > 0
    assert (run["age_max"], run["pauses_s"]) == (0, [])
    assert "one pool, no lanes" in (tmp_path / "bare-1" / "logs" / "sandbox.log").read_text()
    held = {folder.name for folder in (tmp_path / "bare-1" / "weights").glob("v*")}
    assert held == {"v000000", "v000002", "v000003", "v000004"}  # trained on and pruned; the one that is served stays


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("what", "arms"), [("collect", 5), ("publish", 7)])
def test_every_arm_from_the_command_line(what: str, arms: int, tmp_path: Path) -> None:
    small = [part for key in SMALL for part in ("--set", key)]
    argv = ("bench", what, FILE, "--repeat", "1", "--out", tmp_path / "out", "--figures", tmp_path / "figures", *small)
    done = ran(tmp_path, *argv, "--json", "-", timeout_s=400)
    assert done.code == 0, done.err
    assert len(done.document["data"]["arms"]) == arms
    assert done.document == json.loads((tmp_path / "out" / "sheet.json").read_text())
    assert len(list((tmp_path / "figures").iterdir())) == 1
    folders = [Path(run["folder"]) for runs in done.document["data"]["arms"].values() for run in runs]
    assert ran(tmp_path, "report", folders[-1], "--json").document["runs"][0]["steps"] == 4
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_an_interrupted_bench_leaves_nothing_running(tmp_path: Path) -> None:
    with started(tmp_path, "bench", "collect", FILE, "--out", tmp_path / "out") as bench:
        until(lambda: any((tmp_path / "out").glob("*/url")))
        bench.send_signal(signal.SIGINT)
        said = bench.communicate(timeout=60)[1]
    assert bench.returncode == 130, said
    assert left_behind(tmp_path) == []
