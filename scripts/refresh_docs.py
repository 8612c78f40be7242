"""Puts what the documents take from the source between their markers, and draws the picture: `make docs`.

python scripts/refresh_docs.py            writes
python scripts/refresh_docs.py --check    exits 1 and names the pages that are not current
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts import grafana_dashboard, loop_picture  # noqa: E402 - the path comes first
from scripts.import_law import import_law  # noqa: E402
from scripts.module_map import module_map  # noqa: E402
from scripts.recipe_reference import reference  # noqa: E402

PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/loop.svg": {},
    "docs/grafana.json": {},
    "docs/recipes.md": {"recipe keys": reference},
    "docs/architecture.md": {"import law": import_law, "modules": module_map},
}


WHOLE = {loop_picture.PAGE: loop_picture.picture, grafana_dashboard.PAGE: grafana_dashboard.dashboard}


def fresh(name: str) -> tuple[str, str]:
    """The page as it is, and as it should be."""
    was = page = (ROOT / name).read_text()
    if ROOT / name in WHOLE:
        return was, WHOLE[ROOT / name]()
    for title, make in PAGES[name].items():
        begin, end = f"<!-- {title}: made by scripts/refresh_docs.py -->", f"<!-- end of {title} -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{name}: the markers {begin!r} and {end!r} are missing")
        page = f"{head}{begin}\n\n{make()}\n{end}{tail}"
    return was, page


def main() -> int:
    stale = [name for name in PAGES if len(set(fresh(name))) > 1]
    if "--check" in sys.argv:
        sys.stderr.writelines(f"{name}: run make docs\n" for name in stale)
        return bool(stale)
    for name in stale:
        (ROOT / name).write_text(fresh(name)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
