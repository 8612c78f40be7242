"""A whole run whose sandboxes are containers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import RECIPE, left_behind, ran
from tests.dockerd import BUSYBOX, PYTHON, Engine
from tests.live.docker.test_docker import task_folder

pytestmark = [pytest.mark.live, pytest.mark.docker]

STEPS = 3


@pytest.mark.timeout(300)
def test_a_run_in_containers_trains_and_leaves_none(engine: Engine, tmp_path: Path) -> None:
    done = ran(
        tmp_path, "run", RECIPE, "--steps", STEPS, "--run-dir", tmp_path / "run",
        "--set", "sandbox.backend=docker", "--set", f"sandbox.image={PYTHON}",
        "--set", f"sandbox.docker.url={engine.url}", timeout_s=280,
    )  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [step["step"] for step in summary["steps"]] == list(range(1, STEPS + 1))
    assert not engine.containers()
    assert not left_behind(tmp_path)


def test_images_are_built_and_missing_ones_named_before_anything_starts(engine: Engine, tmp_path: Path) -> None:
    for number in range(2):
        task_folder(tmp_path / "tasks" / f"t{number}", f"FROM {BUSYBOX}\nRUN echo {number} > /etc/number\n")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'name = "r"\n[tasks]\nsource = "harbor"\npath = "{tmp_path}/tasks"\n[sandbox]\nbackend = "docker"\n'
        f'[sandbox.docker]\nurl = "{engine.url}"\nnetwork = "none"\n'
    )
    refused = ran(tmp_path, "run", recipe)
    assert refused.code == 2, refused
    assert "2 of 2 images are not on this machine's engine, agentrl-task:" in " ".join(refused.err.split())
    assert "agentrl sandbox build" in " ".join(refused.err.split())
    assert ran(tmp_path, "sandbox", "build", recipe, "--json").document == {"built": 2, "images": 2}
    assert ran(tmp_path, "sandbox", "build", recipe, "--json").document == {"built": 0, "images": 2}
    (tmp_path / "tasks" / "t0" / "task.toml").write_text('[environment]\ndocker_image = "not/here:1"\n')
    named = ran(tmp_path, "sandbox", "build", recipe)
    assert named.code == 2
    assert "t0/task.toml: this machine's engine has no image not/here:1" in " ".join(named.err.split())
