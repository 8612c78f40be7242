"""The pictures of `agentrl report` in docs/pictures/, of simulated runs: `python scripts/report_pictures.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.recipe.load import load_sim  # noqa: E402
from agentrl.report import plots, tracepicture  # noqa: E402
from agentrl.wiring.recording import keep  # noqa: E402
from agentrl.wiring.story import read_story  # noqa: E402
from tests.recordings import recorded  # noqa: E402

RECIPE = 'name = "t"\nsteps = 40\n[batch]\ngroups = 4\nsiblings = 8\n[window]\nattempts = 96\ngroups = '
FLEET = """
name = "fleet"
steps = 12
[fleet]
hosts = 2
cpus_per_host = 32
serving_cpus = 8
[fleet.measured]
step_s = 0.02
sequence_s = 0.001
prefill_token_s = 0.0001
stage_s = 4.0
swap_s = 2.0
ranks = 2
slots = 16
kv_tokens = 600000
[workload.overrides]
turns = 0.4
[policy]
groups = 2
siblings = 8
window_groups = 8
K = 2
[trainer]
step_s = 12.0
"""
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
    draw_fleet(folder)


def draw_fleet(folder: Path) -> None:
    """The trace of a small simulated fleet, and what became of its work."""
    with tempfile.TemporaryDirectory() as below:
        recipe, run = Path(below) / "sim.toml", Path(below) / "a simulated fleet"
        recipe.write_text(FLEET)
        keep(load_sim(recipe), 0, run)
        trace = tracepicture.read(run / "trace.json")
        (folder / "trace.png").write_bytes(tracepicture.png(trace, run.name, began=205, ended=285))
        (folder / "report-rates.png").write_bytes(plots.png("rates", [read_story(run)]))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
