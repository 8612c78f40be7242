"""The exact commands that would start a recipe's engines, for people to read and to run by hand."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from agentrl.hosts.local import free_port
from agentrl.recipe.schema import HostSpec, Recipe
from agentrl.records import Record, Version
from agentrl.serve import command
from agentrl.wiring.derive import model_path

_FIRST_PORT = 30_000
"""Of those that are printed for a host: which of its ports are free only the host knows."""


class Command(Record):
    """line: for a POSIX shell, environment included. The token file, or SGLang's configuration that holds the token,
    must exist before it is run."""

    name: str
    host: str
    argv: list[str]
    env: dict[str, str]
    line: str


def engine_commands(recipe: Recipe, folder: Path) -> list[Command]:
    """folder: where the token and the configuration files are, or would be, where the recipe lists no hosts. With hosts
    nobody is asked: the model's folder is as the recipe names it, the names of a run and of its engines are open.
    UserError where the model is missing here and there is nowhere else."""
    hosts = {host.name: host for host in recipe.hosts}
    model = recipe.model.path if hosts and not recipe.model.path.startswith("builtin:") else str(model_path(recipe))
    made = []
    for index, name in enumerate(recipe.engine_hosts):
        run_dir, python = _place(hosts[name], recipe) if hosts else (str(folder), sys.executable)
        planned = command.Command(
            engines=recipe.engines,
            name=f"e{index}",
            model_path=model,
            version=Version(0),
            context_tokens=recipe.model.context_tokens,
            run_dir=run_dir,
            token_file=f"{run_dir}/token",
            served_name=f"agentrl-{recipe.name}-e{index}",
            python=python,
            first_gpu=recipe.first_gpu(index) if recipe.engines.kind == "sglang" else 0,
        )
        argv = planned.argv(_port(recipe, index, known=not hosts))
        line = _line(planned.env, argv)
        made.append(Command(name=planned.name, host=name or "localhost", argv=argv, env=planned.env, line=line))
    return made


def _place(host: HostSpec, recipe: Recipe) -> tuple[str, str]:
    """A run's folder there and its interpreter, as the host would name them: `~` is its user's to resolve."""
    home = host.home or "~/.agentrl"
    return f"{home}/runs/{recipe.name}-{host.name}", host.python or f"{home}/venv/bin/python"


def _port(recipe: Recipe, index: int, *, known: bool) -> int:
    if recipe.engines.base_port:
        return recipe.engines.base_port + index
    return free_port() if known else _FIRST_PORT + index


def _line(env: Mapping[str, str], argv: list[str]) -> str:
    return " ".join([*(f"{name}={_quote(value)}" for name, value in env.items()), *map(_quote, argv)])


def _quote(word: str) -> str:
    """For a shell, which shall still resolve `~/`."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)
