"""Every command that `agentrl serve up --dry-run` prints, through the argument parser of the installed SGLang."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.recipe.load import load
from agentrl.serve.command import sglang_config
from agentrl.wiring.commands import engine_commands
from tests.engines import SGLANG_PYTHON, SGLANG_RECIPE
from tests.glm import make_glm
from tests.live.sglang.marks import needs_sglang

pytestmark = needs_sglang

RANKS = {"tp_size": 8, "attn_dp_size": 8, "ep_size": 8, "moe_a2a_backend": "deepep"}
BLACKWELL = {
    "kv_cache_dtype": "fp8_e4m3",
    "page_size": 64,
    "dsa_prefill_backend": "trtllm",
    "dsa_decode_backend": "trtllm",
    "mem_fraction_static": 0.85,
    "api_key": "secret",
    "skip_tokenizer_init": True,
    "enable_metrics": True,
    "weight_version": "0",
}
MTP = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
WANTED: dict[str, dict[str, Any]] = {
    "glm-5.2-b300": {**BLACKWELL, **RANKS, "max_running_requests": 512, "speculative_algorithm": None},
    "glm-5.2-b300-shared-kv": {**BLACKWELL, "tp_size": 8, "attn_dp_size": 1, "max_running_requests": 256},
    "glm-5.2-b300-mtp": {**BLACKWELL, **RANKS, **MTP, "max_running_requests": 128, "speculative_algorithm": "EAGLE"},
}


@pytest.mark.parametrize("name", WANTED)
def test_sglang_understands_the_commands_of_the_large_recipes(name: str, tmp_path: Path) -> None:
    recipe = load(SGLANG_RECIPE.parent / f"{name}.toml")
    for command in engine_commands(recipe, tmp_path)[:1]:  # they differ in name and port
        found = resolved(command.argv, tmp_path, make_glm(tmp_path / "model"))
        assert {key: found[key] for key in WANTED[name]} == WANTED[name]


def resolved(argv: list[str], folder: Path, model: Path) -> dict[str, Any]:
    """What SGLang makes of a command, with files that are here in place of those on the host."""
    config = folder / "sglang.yaml"
    config.write_bytes(sglang_config("secret"))
    arguments = argv[argv.index("sglang.launch_server") + 1 :]
    for flag, value in (("--config", config), ("--model-path", model)):
        arguments[arguments.index(flag) + 1] = str(value)
    done = subprocess.run(
        [os.environ[SGLANG_PYTHON], str(Path(__file__).with_name("parse.py"))],
        input=json.dumps(arguments),
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
