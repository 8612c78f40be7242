"""The source tree as the repository's laws see it: parsed, never imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agentrl"


@dataclass(frozen=True)
class Module:
    """name: dotted, without `agentrl.`; the package's own name for an __init__."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def imports(self) -> frozenset[str]:
        """Full dotted names of everything imported anywhere in the file; `from a import b` counts as `a.b`."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: relative import"
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return frozenset(found)


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found.append(Module(path, name, ast.parse(path.read_text())))
    return tuple(found)


def under(name: str, package: str) -> bool:
    """`rollout.attempt` is under `rollout` and under itself."""
    return name == package or name.startswith(package + ".")
