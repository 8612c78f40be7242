"""The documents keep up with the code: every module is on the map, every numbered law is checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repo.tree import PACKAGE, ROOT, modules

NUMBERED = re.compile(r"^(?:#+ *|\| *)?(?:Law )?(\d+)(?:\.|:| *\|)", re.MULTILINE)


def document(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_every_module_is_on_the_map() -> None:
    page = document("architecture.md")
    missing = [
        str(module.path.relative_to(PACKAGE))
        for module in modules()
        if not module.path.name.startswith("__") and not re.search(rf"\b{re.escape(module.path.name)}\b", page)
    ]
    assert not missing, f"docs/architecture.md does not say what these are: {', '.join(missing)}"


def test_every_law_is_written_down_and_checked() -> None:
    written = {int(number) for number in NUMBERED.findall(document("laws.md"))}
    checker = (PACKAGE / "scheduler" / "laws.py").read_text()
    checked = {int(number) for number in re.findall(r"LawBroken\((\d+),", checker)}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    tested = {int(number) for number in re.findall(r"\blaw (\d+)", tests, re.IGNORECASE)}
    assert checked <= written, f"not in docs/laws.md: {sorted(checked - written)}"
    assert written <= checked | tested, f"neither checked nor tested: {sorted(written - checked - tested)}"


def test_no_two_decisions_share_a_number() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert all(re.match(r"\d{4}-", name) for name in names), names
    numbers = [name[:4] for name in names]
    assert len(set(numbers)) == len(numbers), names


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing, f"{path.name}: {missing}"
