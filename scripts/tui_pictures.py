"""The pictures of `agentrl top` in docs/pictures/: `python scripts/tui_pictures.py`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.tui.snapshot import snapshot  # noqa: E402
from tests.scenes import SCENES, StillFeed  # noqa: E402

SIZE = (110, 34)


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, scene in SCENES.items():
        (folder / f"top-{name}.svg").write_text(asyncio.run(snapshot(StillFeed(scene()), SIZE)))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
