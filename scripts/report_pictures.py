"""The pictures of `agentrl report` in docs/pictures/, of two simulated runs: `python scripts/report_pictures.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.report import plots  # noqa: E402
from agentrl.wiring.story import read_story  # noqa: E402
from tests.recordings import recorded  # noqa: E402

RECIPE = 'name = "t"\nsteps = 40\n[batch]\ngroups = 4\nsiblings = 8\n[window]\nattempts = 96\ngroups = '
WINDOWS = {"a window of one batch": 4, "a window of three batches": 12}


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stories = []
    with tempfile.TemporaryDirectory() as below:
        for name, window in WINDOWS.items():
            run = Path(below) / str(window)
            recorded(run, recipe=f"{RECIPE}{window}\n")
            stories.append(msgspec.structs.replace(read_story(run), name=name))
    for plot in ("timeline", "bank", "stages"):
        (folder / f"report-{plot}.png").write_bytes(plots.png(plot, stories))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
