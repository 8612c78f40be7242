"""What a plain import costs: nothing heavy on the way to the command line, the recipe or the nouns."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["agentrl.records", "agentrl.recipe.load", "agentrl.cli.main", "agentrl.wiring", "agentrl.rollout.attempt"],
)
def test_importing_brings_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(set(sys.modules) & {{'torch', 'transformers', 'textual', 'matplotlib'}}))"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
