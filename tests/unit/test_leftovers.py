"""Folders of dead runs on a host: what lives, and what is being set up, stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agentrl.hosts.leftovers import dead, remove


def test_only_what_is_dead_goes(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("dead", "lives", "begins"):
        (runs / name / "logs").mkdir(parents=True)
    command = [sys.executable, "-c", "input()", str(runs / "lives" / "sandbox" / "daemon.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            assert dead(runs, age_s=3_600.0) == []  # any of them may be being set up
            assert [folder.name for folder in dead(runs, age_s=-1.0)] == ["begins", "dead"]
            assert remove(runs, age_s=-1.0) == ["begins", "dead"]
        finally:
            process.communicate(b"\n")
    assert [folder.name for folder in runs.iterdir()] == ["lives"]
    assert remove(tmp_path / "none", age_s=0.0) == []
