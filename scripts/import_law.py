"""Who may import whom, as a table: from the test that enforces it. See refresh_docs.py."""

from __future__ import annotations

from tests.repo.test_layers import ADAPTERS, EXCEPTIONS, HEAVY, MAY_IMPORT, MUST_NOT, SEAM, TORCH_IN


def import_law() -> str:
    rows = [f"| {_code(name)} | {_allowed(allowed)} | {_code(*MUST_NOT.get(name, ()))} |" for name, allowed in _rows()]
    notes = [
        f"*the seam*: {_code(*SEAM)}. {_list(HEAVY)} only in {_code(*TORCH_IN)}.",
        *(f"Exception: `{name}` imports {_code(what)}: {why}." for (name, what), why in EXCEPTIONS.items()),
    ]
    head = ["| package | may import of agentrl, besides itself | must not import |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", "  \n".join(notes)]) + "\n"


def _rows() -> list[tuple[str, tuple[str, ...]]]:
    """The adapters share one line: they have one rule."""
    shown = [(name, allowed) for name, allowed in MAY_IMPORT.items() if name and name not in ADAPTERS]
    at = [name for name, _ in shown].index("runtime")
    return [*shown[:at], (", ".join(ADAPTERS), MAY_IMPORT[ADAPTERS[0]]), *shown[at:]]


def _allowed(names: tuple[str, ...]) -> str:
    """Names that many share have a name of their own."""
    short = []
    if set(SEAM) <= set(names):
        short, names = ["*the seam*"], tuple(name for name in names if name not in SEAM)
    if set(ADAPTERS) <= set(names):
        short, names = [*short, "*the adapters*"], tuple(name for name in names if name not in ADAPTERS)
    return ", ".join([*short, *([_code(*names)] if names else [])]) or "nothing"


def _code(*names: str) -> str:
    return ", ".join(f"`{part}`" for name in names for part in name.split(", "))


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}"
