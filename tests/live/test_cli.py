"""The command line with real processes behind it: services that live on, a run served by them, a trainer attached."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.publish.store import DiskWeightStore
from agentrl.records import Version
from tests.cli import RECIPE, agentrl, left_behind, ran, started, until

pytestmark = pytest.mark.live

SMALL = ["--set", "batch.groups=1", "--set", "batch.siblings=2", "--set", "engines.slots=8", "--set", "window.groups=2"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A working folder whose services are down afterwards, whatever a test did."""
    yield tmp_path
    for kind in ("serve", "sandbox"):
        ran(tmp_path, kind, "down", RECIPE, "--quiet")
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_engines_live_on_and_take_versions(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    up = ran(place, "serve", "up", RECIPE, "--json")
    assert up.code == 0, up.err
    first, second = up.document["parts"]
    again = ran(place, "serve", "up", RECIPE)
    assert again.code == 2
    assert f"runs already (process {up.document['pid']})" in again.err

    weights = tmp_path_factory.mktemp("run")
    (weights / "recipe.toml").write_text(RECIPE.read_text())
    store = DiskWeightStore(str(weights / "weights"))
    store.adopt(str(Path(up.document["folder"]) / "weights" / "v000000"))
    initial = Path(store.path(Version(0)))
    store.put(
        Version(1), lambda to: Path(to, "model.safetensors").write_bytes((initial / "model.safetensors").read_bytes())
    )
    pushed = ran(place, "publish", weights, "--json")
    assert pushed.code == 0, pushed.err
    assert [(p["before"], p["version"]) for p in pushed.document["pushed"]] == [(0, 1), (0, 1)]
    assert all(p["pause_s"] > 0 for p in pushed.document["pushed"])
    assert ran(place, "publish", weights, "9").code == 2
    older = ran(place, "publish", weights, "0")
    assert older.code == 2
    assert "versions only grow" in older.err

    os.kill(second["pid"], signal.SIGKILL)
    until(lambda: not psutil.pid_exists(second["pid"]))
    status = ran(place, "serve", "status", RECIPE, "--json")
    assert status.code == 3
    assert [(e["serves"], e["version"]) for e in status.document["engines"]] == [(True, 1), (False, -1)]
    assert first["url"] in ran(place, "serve", "status", RECIPE).out

    down = ran(place, "serve", "down", RECIPE)
    assert down.code == 0
    assert left_behind(place) == []
    assert {path.suffix for path in (place / "runs").rglob("*") if path.is_file()} <= {".log", ".lock", ""}


def test_a_keeper_that_is_killed_takes_all_along(place: Path) -> None:
    up = ran(place, "sandbox", "up", RECIPE, "--json")
    assert up.code == 0, up.err
    os.kill(up.document["pid"], signal.SIGKILL)
    until(lambda: left_behind(place) == [])
    assert ran(place, "sandbox", "status", RECIPE).code == 3
    assert ran(place, "sandbox", "gc", RECIPE, "--json").code == 0


def test_sandboxes_by_hand(place: Path) -> None:
    assert ran(place, "sandbox", "up", RECIPE, "--quiet").code == 0
    done = ran(place, "sandbox", "exec", RECIPE, "--json", "--", "echo $((6*7)); pwd; exit 3")
    assert done.code == 1
    assert (done.document["output"], done.document["exit_code"]) == ("42\n/work\n", 3)
    assert done.document["lane"] == "command"
    shown = ran(place, "sandbox", "exec", RECIPE, "--", "printf", "%s", "--debug $HOME [x]")
    assert (shown.code, shown.out) == (0, "--debug $HOME [x]\n")
    assert "ran" in shown.err
    assert ran(place, "sandbox", "exec", RECIPE, "--timeout", "0.3", "--", "sleep", "60").code == 1
    status = ran(place, "sandbox", "status", RECIPE, "--json").document["status"]
    assert status["live"] == 0
    assert sum(lane["done"] for lane in status["lanes"] if lane["lane"] == "command") >= 3
    assert ran(place, "sandbox", "down", RECIPE).code == 0


def test_a_run_on_services_with_an_attached_trainer(place: Path) -> None:
    """Everything borrowed: the run starts nothing itself. Then its journal replays, and it goes on where it was."""
    engines = ran(place, "serve", "up", RECIPE, "--json", *SMALL, "--set", "engines.count=1").document
    daemon = ran(place, "sandbox", "up", RECIPE, "--json").document
    folder = place / "runs" / "borrowed"
    argv = ["run", RECIPE, "--run-dir", folder, "--json", *SMALL, "--set", "train.embedded=false"]
    argv += ["--set", "engines.count=1", "--set", f"engines.attach={json.dumps([p['url'] for p in engines['parts']])}"]
    argv += ["--set", f"engines.token_file={engines['token_file']}", "--set", f"sandbox.attach={daemon['folder']}"]
    with started(place, *argv, "--steps", "2") as run:
        until((folder / "url").is_file)
        wrong = ran(place, "train", RECIPE, "--attach", folder, *SMALL, "--set", "train.lr=1")
        assert wrong.code == 2
        assert "started with another train.lr" in wrong.err
        trained = ran(place, "train", RECIPE, *SMALL, "--json")
        out, err = run.communicate(timeout=60)
    assert trained.code == 0, trained.err
    assert [step["version"] for step in trained.document["steps"]] == [1, 2]
    assert run.returncode == 0, err
    summary = json.loads(out)
    assert (summary["outcome"], summary["ledger_balanced"], len(summary["steps"])) == ("done", True, 2)
    replayed = agentrl("replay", folder, "--laws", "--json")
    assert replayed.code == 0, replayed.out
    assert not (folder / "url").exists()

    held = ran(place, "serve", "status", RECIPE, "--json", *SMALL).document["engines"]
    assert [(e["serves"], e["version"], e["running"]) for e in held] == [(True, 2, 0)]
    assert ran(place, "sandbox", "status", RECIPE, "--json").document["status"]["live"] == 0

    with started(place, *argv, "--steps", "3") as run:
        until((folder / "url").is_file)
        url = (folder / "url").read_text().strip()
        with started(place, "train", RECIPE, "--attach", folder, "--url", url, *SMALL) as trainer:
            published = ran(place, "publish", folder, "--json")
            out, err = run.communicate(timeout=60)
            trainer.communicate(timeout=60)
    assert run.returncode == 0, err
    assert [step["version"] for step in json.loads(out)["steps"]][-1] == 3
    assert published.code == 0, published.err
    assert all(version >= 2 for version in published.document["engines"].values())
    assert agentrl("replay", folder, "--json").document["processes"] == 2


def test_the_doctor_leaves_nothing(place: Path) -> None:
    done = ran(place, "doctor", RECIPE, "--json")
    assert done.code == 0, done.out
    states = {check["name"]: check["state"] for check in done.document["checks"]}
    assert states["model"] == states["sandboxes"] == states["libraries"] == "ok"
    assert list(place.iterdir()) == []
    broken = ran(place, "doctor", RECIPE, "--json", "--set", "model.path=/nowhere", "--set", "engines.base_port=1")
    assert broken.code == 2
    assert [c["name"] for c in broken.document["checks"] if c["state"] == "fail" and c["users"]] == ["model"]
