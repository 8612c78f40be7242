"""Folders of dead runs on a machine, removed: `python -m agentrl.hosts.leftovers RUNS AGE_S`; their names, as JSON.

A run is dead where no process names its folder and nothing in it has changed for AGE_S: what is being set up has
no process yet, but changes all the time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path


def dead(runs: Path, age_s: float) -> list[Path]:
    """Blocks."""
    if not runs.is_dir():
        return []
    lines = list(_command_lines())
    latest = time.time() - age_s
    return [
        folder
        for folder in sorted(runs.iterdir())
        if _changed(folder) < latest and not any(os.fsencode(folder) in line for line in lines)
    ]


def remove(runs: Path, age_s: float) -> list[str]:
    """Names of those that were removed. Blocks."""
    folders = dead(runs, age_s)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in folders]


def _changed(folder: Path) -> float:
    """When anything in it was last changed, by its own file system's clock."""
    newest = folder.lstat().st_mtime
    for path in folder.rglob("*"):
        with suppress(OSError):
            newest = max(newest, path.lstat().st_mtime, path.lstat().st_ctime)
    return newest


def _command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes())
    return found


if __name__ == "__main__":
    json.dump(remove(Path(sys.argv[1]), float(sys.argv[2])), sys.stdout)
