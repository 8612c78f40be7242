"""The pictures of `agentrl top` in docs/pictures/, and the frames that tests compare with: `make pictures`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.tui.snapshot import snapshot  # noqa: E402
from tests.scenes import SCENES, SNAPSHOTS, StillFeed, frame_text  # noqa: E402

SIZE = (110, 34)


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, scene in SCENES.items():
        (folder / f"top-{name}.svg").write_text(asyncio.run(snapshot(StillFeed(scene()), SIZE)))


def keep_frames(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, scene in SCENES.items():
        for size in ((80, 24), (200, 60)):
            drawn = frame_text(asyncio.run(snapshot(StillFeed(scene()), size)))
            (folder / f"{name}-{size[0]}x{size[1]}.txt").write_text(drawn)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        draw(Path(sys.argv[1]))
    else:
        draw(ROOT / "docs" / "pictures")
        keep_frames(SNAPSHOTS)
