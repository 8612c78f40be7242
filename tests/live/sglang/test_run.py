"""The whole loop with real SGLang: rollout, sandboxes, training, publication into an engine that goes on generating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contract.sandboxes import require
from tests.engines import SGLANG_PYTHON, SGLANG_RECIPE
from tests.live.sglang.marks import needs_sglang

pytestmark = [*needs_sglang, pytest.mark.slow]

STEPS = 2
SMALL = ("batch.groups=2", "batch.siblings=4", "window.groups=3", "engines.slots=8")


@pytest.mark.parametrize(
    "recipe", [SGLANG_RECIPE, SGLANG_RECIPE.with_name("local-sglang-ranks.toml")], ids=["disk", "broadcast"]
)
def test_two_steps_with_publication_to_real_sglang(recipe: Path, tmp_path: Path) -> None:
    require("namespace")
    run, began = tmp_path / "run", time.time()
    settings = [f"engines.python={os.environ[SGLANG_PYTHON]}", *SMALL]
    command = [sys.executable, "-m", "agentrl.cli.main", "run", str(recipe), "--steps", str(STEPS)]
    command += ["--run-dir", str(run), "--json", *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = json.loads(done.stdout)
    assert summary["outcome"] == "done"
    assert summary["ledger_balanced"]
    assert [step["version"] for step in summary["steps"]] == [1, 2]
    for step in summary["steps"]:
        assert (step["groups"], step["trajectories"]) == (2, 8)
        assert step["logprob_gap"]["max"] is None or step["logprob_gap"]["max"] < 1e-4
        print(f"step {step['step']}: prefix reuse {step['prefix_reuse']:.2f}, gap {step['logprob_gap']['max']}")
    checksums = [published(publication) for publication in summary["publications"]]
    assert len(set(checksums)) == len(checksums) == STEPS
    assert not left_of(run, began)


def published(publication: dict[str, Any]) -> str:
    """Checksum that the only engine proved after it took this version."""
    [engine] = publication["engines"]
    print(f"version {publication['version']}: staged in {engine['stage_s']:.3f} s, paused {engine['pause_s']:.3f} s")
    assert 0 < engine["pause_s"] < 60
    assert engine["lost_tokens"] == 0
    return str(engine["checksum"])


def left_of(run: Path, since: float) -> list[str]:
    """Processes with the run's folder on their command line, or that SGLang gave a name of its own, started `since`."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.info["create_time"] >= since and (str(run) in line or line.startswith("sglang::")):
            found.append(line)
    return found
