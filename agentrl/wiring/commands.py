"""The exact commands that would start a recipe's engines, for people to read and to run by hand."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from agentrl.hosts.local import free_port
from agentrl.recipe.schema import Recipe
from agentrl.records import Record, Version
from agentrl.serve.launch import embedded_command, sglang_command, sglang_env
from agentrl.wiring.derive import model_path


class Command(Record):
    """line: for a POSIX shell, environment included. The token file must exist before it is run."""

    name: str
    host: str
    argv: list[str]
    env: dict[str, str]
    line: str


def engine_commands(recipe: Recipe, folder: Path) -> list[Command]:
    """folder: where the token and the configuration files are, or would be. UserError where the model is missing."""
    model, engines = str(model_path(recipe)), recipe.engines
    made = []
    for index in range(engines.count):
        name = f"e{index}"
        port = engines.base_port + index if engines.base_port else free_port()
        served_name = f"agentrl-{name}-{secrets.token_hex(8)}"
        if engines.kind == "embedded":
            argv, env = (
                embedded_command(
                    engines,
                    model,
                    port,
                    version=Version(0),
                    context_tokens=recipe.model.context_tokens,
                    token_file=str(folder / "token"),
                    served_name=served_name,
                ),
                {},
            )
        else:
            argv, env = (
                sglang_command(
                    engines,
                    model,
                    port,
                    version=Version(0),
                    context_tokens=recipe.model.context_tokens,
                    config_file=str(folder / f"{name}.sglang.yaml"),
                    served_name=served_name,
                ),
                sglang_env(engines),
            )
        made.append(Command(name=name, host="localhost", argv=argv, env=dict(env), line=_line(env, argv)))
    return made


def _line(env: Mapping[str, str], argv: list[str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(argv)])
