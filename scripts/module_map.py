"""One line for each module, by folder: the first sentence of its docstring. See refresh_docs.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "agentrl"

_SHORT = 30  # a first sentence below this says too little


def module_map() -> str:
    folders: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        if path.name != "__init__.py":
            folder = path.parent.relative_to(ROOT).as_posix()
            folders.setdefault(folder, []).append(f"* [`{path.name}`](../{path.relative_to(ROOT)}): {purpose(path)}")
    return "\n\n".join(f"**`{folder}/`**\n\n" + "\n".join(lines) for folder, lines in folders.items()) + "\n"


def purpose(path: Path) -> str:
    """The docstring's first sentence, the second too where the first is a mere name; in one line."""
    said = ast.get_docstring(ast.parse(path.read_text())) or "(it does not say)"
    paragraph = " ".join(said.split("\n\n")[0].split())
    sentences = re.split(r"(?<=[.!?]) ", paragraph)
    text = sentences[0] if len(sentences[0]) >= _SHORT else " ".join(sentences[:2])
    return text.rstrip(".:") + "."
