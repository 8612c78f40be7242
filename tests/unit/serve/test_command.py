"""Command lines of engines: those of the shipped recipes are what they were, and no secret is in any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.recipe.load import load
from agentrl.recipe.schema import Engines, HostSpec, Recipe
from agentrl.records import Version
from agentrl.serve.command import Command, sglang_config
from agentrl.wiring.commands import engine_commands
from agentrl.wiring.kv import kv_fit
from tests.glm import make_glm

RECIPES = Path(__file__).parents[3] / "recipes"
COMMON = (
    "--host 127.0.0.1 --port {port} --served-model-name agentrl-{name}-e{index} --weight-version 0"
    " --context-length 131072 --dtype bfloat16 "
)
TOKENS = "--skip-tokenizer-init --enable-metrics --enable-metrics-for-all-schedulers"
MEMORY = "--kv-cache-dtype fp8_e4m3 --mem-fraction-static 0.85 --chunked-prefill-size 32768 "
RANKS = "--tp-size 8 --attn-dp-size 8 --ep-size 8 "
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 4 "
)
GLM = {
    "glm-5.2-b300": f"{RANKS}--max-running-requests 512 {MEMORY}{TOKENS} --moe-a2a-backend deepep",
    "glm-5.2-b300-shared-kv": f"--tp-size 8 --max-running-requests 256 {MEMORY}{TOKENS}",
    "glm-5.2-b300-mtp": f"{RANKS}--max-running-requests 128 {MEMORY}{MTP}{TOKENS} --moe-a2a-backend deepep",
}


@pytest.mark.parametrize("name", GLM)
def test_the_commands_of_the_large_recipes(name: str, tmp_path: Path) -> None:
    commands = engine_commands(load(RECIPES / f"{name}.toml"), tmp_path)
    assert [(command.name, command.host) for command in commands] == [(f"e{i}", f"b300-{i + 1}") for i in range(4)]
    for index, command in enumerate(commands):
        home = "~/.agentrl"
        begins = (
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 HF_HUB_OFFLINE=1"
            f" {home}/venv/bin/python -m sglang.launch_server"
            f" --config {home}/runs/{name}-b300-{index + 1}/e{index}.sglang.yaml --model-path /models/GLM-5.2-FP8 "
        )
        common = COMMON.format(port=30_000 + index, name=name, index=index)
        assert command.line == begins + common + GLM[name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_no_token_is_on_a_command_line(kind: Any) -> None:
    command = command_of(Engines(kind=kind))
    assert "secret" not in " ".join([*command.argv(1), *command.env.values()])
    assert sglang_config("secret") == b'{"api-key": "secret"}'


def test_what_the_recipe_adds_comes_last_and_wins() -> None:
    command = command_of(
        Engines(kind="sglang", memory_share=0.5, args=("--mem-fraction-static", "0.1"), env={"HF_HUB_OFFLINE": "0"})
    )
    assert command.argv(1)[-2:] == ["--mem-fraction-static", "0.1"]
    assert command.argv(1).count("--mem-fraction-static") == 2
    assert command.env["HF_HUB_OFFLINE"] == "0"


def test_engines_of_one_host_take_gpus_of_their_own(tmp_path: Path) -> None:
    recipe = Recipe(
        name="a",
        engines=Engines(kind="sglang", count=3, ranks=2, gpus=4),
        hosts=(HostSpec(name="g", engines=2), HostSpec(name="h")),
    )
    found = [flag(command.argv, "--base-gpu-id") for command in engine_commands(recipe, tmp_path)]
    assert found == [None, "4", None]


@pytest.mark.parametrize(
    ("changes", "size", "of"),
    [
        ({"kv_dtype": "fp8_e4m3"}, 78 * 576 + 78 * 132, "78 layers of 512+64 latent x 1 B, 78 indexers of 132 B"),
        ({"kv_dtype": "bfloat16"}, 78 * 1152 + 78 * 132, "78 layers of 512+64 latent x 2 B, 78 indexers of 132 B"),
        ({"kv_dtype": "fp8_e4m3", "draft_tokens": 3}, 79 * 576 + 79 * 132, "79 layers of"),
    ],
)
def test_kv_of_a_model_with_latent_attention_and_an_indexer(
    changes: dict[str, Any], size: int, of: str, tmp_path: Path
) -> None:
    recipe = load(RECIPES / "glm-5.2-b300.toml")
    engines = msgspec.structs.replace(recipe.engines, **changes)
    fit = kv_fit(msgspec.structs.replace(recipe, engines=engines), make_glm(tmp_path), 750 * 10**9)
    assert fit is not None
    assert fit.token_bytes == size
    assert fit.of.startswith(of)
    assert fit.rank_tokens == int((288e9 * 0.85 - 750e9 / 8) / size)


def test_layers_that_share_an_index_keep_none(tmp_path: Path) -> None:
    kinds = ["full" if layer % 4 == 0 else "shared" for layer in range(78)]
    fit = kv_fit(load(RECIPES / "glm-5.2-b300.toml"), make_glm(tmp_path, indexer_types=kinds), 0)
    assert fit is not None
    assert fit.token_bytes == 78 * 576 + 20 * 132


def test_kv_of_plain_attention_is_shared_out_over_the_gpus_of_a_rank(tmp_path: Path) -> None:
    plain = {"kv_lora_rank": None, "num_key_value_heads": 8, "head_dim": 128}
    recipe = Recipe(name="a", engines=Engines(kind="sglang", ranks=2, gpus=4, dtype="bfloat16"))
    fit = kv_fit(recipe, make_glm(tmp_path, **plain), 0)
    assert fit is not None
    assert fit.token_bytes == 78 * 2 * 4 * 128 * 2
    assert fit.rank_tokens == 65_536
    (tmp_path / "config.json").write_text("{}")
    assert kv_fit(recipe, tmp_path, 0) is None


def command_of(engines: Engines) -> Command:
    return Command(
        engines=engines,
        name="e0",
        model_path="/m",
        version=Version(0),
        context_tokens=64,
        run_dir="/r",
        token_file="/r/token",
        served_name="n",
    )


def flag(argv: list[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None
