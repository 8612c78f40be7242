"""Small files, small functions. Whoever needs an exception writes it down with its reason."""

from __future__ import annotations

import ast

from tests.repo.tree import modules

FILE_LINES = 400
FUNCTION_LINES = 60

FILES: dict[str, str] = {}  # module -> reason
FUNCTIONS: dict[str, str] = {}  # module:function -> reason


def functions(tree: ast.Module) -> list[tuple[str, int]]:
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files_are_small() -> None:
    lengths = {module.name: len(module.path.read_text().splitlines()) for module in modules()}
    long = {name: length for name, length in lengths.items() if length > FILE_LINES}
    assert set(long) == set(FILES), long


def test_functions_are_small() -> None:
    long = {
        f"{module.name}:{name}": length
        for module in modules()
        for name, length in functions(module.tree)
        if length > FUNCTION_LINES
    }
    assert set(long) == set(FUNCTIONS), long
