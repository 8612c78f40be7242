"""Who may import whom. The table is the one in docs/architecture.md; syntax trees are walked, nothing is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.repo.tree import Module, modules, under

NOUNS = ("records", "errors")
SEAM = (*NOUNS, "ports", "recipe", "wire", "lifeline", "finish")  # the last three are leaves: formats, two mechanisms
ADAPTERS = ("serve", "sandbox", "tasks", "journal", "publish", "hosts", "train")

# package -> what of agentrl it may import besides itself. The longest matching name decides.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": (),
    "records": (),
    "errors": ("records",),
    "lifeline": (),
    "finish": (),
    "wire": NOUNS,
    "ports": ("records",),
    "recipe": NOUNS,
    "scheduler": ("records",),
    "train.batching": ("records",),
    "rollout": (*NOUNS, "ports", "finish"),
    **dict.fromkeys(ADAPTERS, SEAM),
    "runtime": (*NOUNS, "ports", "wire", "scheduler", "rollout", "train.batching"),
    "sim": (*NOUNS, "ports", "recipe", "scheduler", "runtime.player"),
    "report": NOUNS,
    "wiring": (*SEAM, *ADAPTERS, "scheduler", "rollout", "runtime", "sim", "report"),
    "bench": (*SEAM, "wiring", "sim", "scheduler", "runtime.loop", "runtime.status"),
    "tui": ("records", "runtime.status"),
    "cli": (*NOUNS, "wiring", "recipe", "bench", "tui", "report", "journal", "runtime.status"),
}

# package -> top-level modules it must not import, ours or not.
MUST_NOT: dict[str, tuple[str, ...]] = {
    "scheduler": ("asyncio", "time", "datetime", "random", "os", "logging", "threading", "numpy", "torch"),
    "train.batching": ("asyncio", "time", "random", "os", "torch"),
    "rollout": ("time", "random", "torch"),
    "recipe": ("torch", "asyncssh", "asyncio"),
    "records": ("asyncio", "time", "random", "os"),
    "ports": ("asyncio", "time", "random", "os"),
    "sim": ("torch", "time"),
}

TORCH_IN = ("serve.embedded", "train.worker")
HEAVY = ("torch", "transformers", "safetensors")

# (module, what it imports) -> why this one may.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("train.worker.__main__", "publish"): "the trainer is a process of its own; this is its wiring",
}


def rule(name: str) -> str:
    return max((package for package in MAY_IMPORT if package == "" or under(name, package)), key=len)


def ours(module: Module) -> set[str]:
    """What it imports of agentrl, without the prefix; a module's members come with the module's name before them."""
    return {name.removeprefix("agentrl.") for name in module.imports if name.startswith("agentrl.")}


def excused(module: Module, imported: str) -> bool:
    return any(module.name == name and under(imported, what) for name, what in EXCEPTIONS)


def climbing(module: Module) -> Iterator[str]:
    """What it imports that the table does not allow."""
    package = rule(module.name)
    if module.name:
        assert package, f"{module.name}: a new package needs a line in the table and in docs/architecture.md"
    allowed = (package, "__version__", *MAY_IMPORT[package])
    for name in sorted(ours(module)):
        if not any(under(name, a) for a in allowed) and not excused(module, name):
            yield f"{module.name} may not import {name}"


def impure(module: Module) -> Iterator[str]:
    """What it imports that its package must do without."""
    banned = {top for package, tops in MUST_NOT.items() if under(module.name, package) for top in tops}
    if not any(under(module.name, home) for home in TORCH_IN):
        banned |= set(HEAVY)
    for top in sorted({name.split(".")[0] for name in module.imports} & banned):
        if not excused(module, top):
            yield f"{module.name} must not import {top}"


@pytest.mark.parametrize("law", [climbing, impure])
def test_imports_go_down_the_page(law: Callable[[Module], Iterator[str]]) -> None:
    wrong = [fault for module in modules() for fault in law(module)]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_the_command_line_or_the_screen() -> None:
    for module in modules():
        if not under(module.name, "cli"):
            assert not any(under(name, "cli") for name in ours(module)), module.name
        if not under(module.name, "tui") and not under(module.name, "cli"):
            assert not any(under(name, "tui") for name in ours(module)), module.name


@pytest.mark.parametrize(("name", "what"), EXCEPTIONS, ids=lambda part: str(part))
def test_every_exception_is_still_one(name: str, what: str) -> None:
    [module] = [module for module in modules() if module.name == name]
    assert any(under(i, what) for i in ours(module) | set(module.imports)), "no longer needed: remove it from the list"
