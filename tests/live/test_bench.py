"""The live benches on real engines, sandboxes and a real trainer."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from agentrl.bench.live import play
from agentrl.recipe.load import load
from agentrl.wiring import Trial
from tests.cli import left_behind, ran

pytestmark = pytest.mark.live

FILE = Path(__file__).parents[2] / "recipes" / "bench-local.toml"
SMALL = ("steps=4", "batch.groups=1", "batch.siblings=2", "window.groups=2", "tasks.tests_wait_s=0", "engines.count=1")


def test_arms_are_real_runs_kept_side_by_side(tmp_path: Path) -> None:
    """The scattered and pooled arm at fixed weights, and the one that trains and publishes nothing."""
    recipe = load(FILE, overrides=SMALL)
    untrained = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, embedded=False))
    arms = (
        play.Arm(name="pool", recipe=untrained, trial=Trial(weights="collected", per_request=True, pooled=True)),
        play.Arm(name="beside", recipe=recipe, trial=Trial(weights="unpublished")),
    )
    lines: list[str] = []
    runs, _ = play.play_all(arms, 1, tmp_path, lambda *told: None, lines.append)
    [pool], [beside] = runs.values()
    assert len(lines) == 2
    assert left_behind(tmp_path) == []
    for run in (pool, beside):
        assert len(run["intervals_s"]) == 2
        assert run["cpu_s"]["engines"] > 0
        assert run["cpu_s"]["sandboxes"] > 0
        assert run["age_max"] == 0
        assert run["pauses_s"] == []
    assert pool["cpu_s"]["trainer"] == 0
    assert beside["cpu_s"]["trainer"] > 0
    assert "one pool, no lanes" in (tmp_path / "pool-1" / "logs" / "sandbox.log").read_text()
    held = {folder.name for folder in (tmp_path / "beside-1" / "weights").glob("v*")}
    assert held == {"v000000", "v000002", "v000003", "v000004"}  # trained on, pruned, the served one kept


@pytest.mark.slow
@pytest.mark.parametrize(("what", "arms"), [("collect", 4), ("publish", 7)])
def test_every_arm_from_the_command_line(what: str, arms: int, tmp_path: Path) -> None:
    small = [part for key in (*SMALL[:-1], "engines.count=2") for part in ("--set", key)]
    argv = ("bench", what, FILE, "--repeat", "1", "--out", tmp_path / "out", "--figures", tmp_path / "figures", *small)
    done = ran(tmp_path, *argv, "--json", "-", timeout_s=400)
    assert done.code == 0, done.err
    assert len(done.document["data"]["arms"]) == arms
    assert done.document == json.loads((tmp_path / "out" / "sheet.json").read_text())
    assert len(list((tmp_path / "figures").iterdir())) == 1
    folders = [Path(run["folder"]) for runs in done.document["data"]["arms"].values() for run in runs]
    assert ran(tmp_path, "report", folders[-1], "--json").document["runs"][0]["steps"] == 4
    assert left_behind(tmp_path) == []
