"""What the documents take from the source is current, and what the source offers is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import app
from agentrl.recipe.schema import Recipe
from agentrl.records import Batch, GroupId, GroupProof, StepReport, Version
from agentrl.runtime.telemetry import Telemetry
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from scripts import module_map, recipe_reference, refresh_docs
from tests.builders import attempt_id, trajectory
from tests.repo.tree import ROOT

CLI = (ROOT / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("name", refresh_docs.PAGES)
def test_what_a_page_takes_from_the_source_is_current(name: str) -> None:
    page, fresh = refresh_docs.fresh(name)
    assert page == fresh, "run: make docs"


def test_every_recipe_key_says_what_it_means() -> None:
    silent = [key for key, meaning in recipe_reference.meanings().items() if not meaning]
    sections = {kind.__name__ for _, kind in recipe_reference.sections(Recipe, "")}
    wanted = [f"{section}.{name}" for section, name in silent if section in sections - {"Recipe"} and name != "lanes"]
    assert not wanted


def test_every_module_says_what_it_is_for() -> None:
    modules = [path for path in module_map.PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    silent = [str(path) for path in modules if module_map.purpose(path).startswith("(it does not")]
    assert not silent


def test_every_command_is_documented_and_every_documented_one_exists() -> None:
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    offered = {command.name for command in app.registered_commands} | set(groups)
    assert set(re.findall(r"^\| `agentrl (\w+)", CLI, re.MULTILINE)) == offered
    for name, group in groups.items():
        assert group is not None
        verbs = {command.name or getattr(command.callback, "__name__", "") for command in group.registered_commands}
        written = re.findall(rf"^\| `agentrl {name} ([\w\\|]+)", CLI, re.MULTILINE)
        assert {verb for words in written for verb in words.split("\\|")} == verbs


def keys(value: Any) -> Iterator[str]:
    """Every field's name, except below what is said to be free."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in ("metrics", "totals", "histogram", "engines"):
                yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_every_field_of_the_summary_is_defined(tmp_path: Path) -> None:
    telemetry = Telemetry(
        tmp_path,
        {"recipe": "r", "seed": 0, "mode": "live"},
        clock=lambda: 1.0,
        order="rolling",
        in_flight="continue",
    )
    batch = Batch(
        id=0,
        version=Version(0),
        bound=1,
        proofs=(GroupProof(group=GroupId(1), oldest=Version(0), tokens=((Version(0), 1),)),),
        trajectories=(trajectory(attempt_id()),),
    )
    telemetry.stepped(batch, StepReport(batch=0, version=Version(1), seconds=1.0))
    telemetry.close()
    core = Core(Policy(steps=1, groups=1, siblings=1, window_groups=1, window_attempts=1, bound=1))
    missing = {key for key in keys(telemetry.summary(core, 1.0)) if f"`{key}`" not in CLI}
    assert not missing, f"docs/cli.md does not define {sorted(missing)}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"])
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    missing = [target for target in targets if not ((ROOT / name).parent / target).exists()]
    assert not missing
