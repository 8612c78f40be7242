"""TOML to a typed recipe. Strict: a key nobody reads is an error, named with its path and the nearest valid one."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from agentrl.errors import RecipeError
from agentrl.recipe.check import check
from agentrl.recipe.schema import Recipe, Section
from agentrl.recipe.sim import SimRecipe

R = TypeVar("R", bound=Section)
Where = Callable[[tuple[str, ...]], str]

_CONVERSION = re.compile(r"(?P<fault>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)

_EXAMPLES = {"name": '"local"'}


def load(path: str | Path, *, overrides: Sequence[str] = (), checked: bool = True) -> Recipe:
    """The recipe at `path` with `a.b=c` overrides, c in TOML's syntax or a bare word.

    Raises RecipeError for the first thing that is wrong. checked=False leaves out the rules that relate several keys
    (`check`), for `plan`, which shows all of them.
    """
    recipe, where = _load(Recipe, Path(path), overrides)
    for problem in check(recipe) if checked else ():
        if problem.fatal:
            raise RecipeError(where(tuple(problem.where.split("."))), problem.message, hint=problem.hint)
    return recipe


def load_sim(path: str | Path, *, overrides: Sequence[str] = ()) -> SimRecipe:
    """Likewise a recipe of a simulated fleet. Raises RecipeError for the first thing that is wrong."""
    recipe, where = _load(SimRecipe, Path(path), overrides)
    for at, message, hint in recipe.problems():
        raise RecipeError(where(tuple(at.split("."))), message, hint=hint)
    return recipe


def _load(kind: type[R], file: Path, overrides: Sequence[str]) -> tuple[R, Where]:
    """The recipe, and where a TOML path was set, for messages."""
    document = _read(file)
    origin = {_apply(document, override): f"--set {override}" for override in overrides}

    def where(path: tuple[str, ...]) -> str:
        return origin.get(path) or f"{file}: {'.'.join(path)}".removesuffix(": ")

    return _convert(kind, document, where), where


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.toml")], n=1)
        hint = f"did you mean {file.parent / near[0]}?" if near else "recipes are TOML files, e.g. recipes/local.toml"
        raise RecipeError(str(file), "no such file", hint=hint) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise RecipeError(str(file), f"cannot be read ({exc})", hint="name a TOML file") from exc
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise RecipeError(str(file), f"not valid TOML: {exc}", hint="correct the line that is named") from exc


def _apply(document: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set one `a.b=c` in the document; its path."""
    key, equals, text = override.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise RecipeError(f"--set {override}", "not of the form a.b=c", hint="for example --set batch.groups=8")
    table = document
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise RecipeError(f"--set {override}", f"{part} is a value, not a section")
        table = inner
    table[path[-1]] = _value(text.strip())
    return path


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word


def _convert(kind: type[R], document: Mapping[str, Any], where: Where) -> R:
    for path, known in _unknown(document, kind, ()):
        raise RecipeError(where(path), "unknown key", hint=_suggest(path[-1], known))
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as exc:
        match = _CONVERSION.fullmatch(str(exc))
        assert match is not None
        path = tuple(re.sub(r"\[.*?\]", "", match["path"] or "").split(".")[1:])
        message, hint = _fault(kind, match["fault"], document, path)
        raise RecipeError(where(path), message, hint=hint) from exc


def _unknown(
    table: Mapping[str, Any], section: type[Section], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    hints = get_type_hints(section)
    for key, value in table.items():
        if key not in section.__struct_fields__:
            yield (*path, key), list(section.__struct_fields__)
        elif isinstance(value, Mapping) and isinstance(hints[key], type) and issubclass(hints[key], Section):
            yield from _unknown(value, hints[key], (*path, key))


def _suggest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"valid here: {', '.join(known)}"


def _fault(recipe: type[Section], fault: str, document: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, str]:
    """msgspec's words turned to what was found and what was wanted; and a hint."""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", fault):
        return f"{missing[1]} is missing", f"add it, for example {missing[1]} = {_EXAMPLES.get(missing[1], '...')}"
    value: Any = document
    kind: Any = recipe
    for part in path:
        value, kind = value[part], get_type_hints(kind)[part]
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return f"found {value!r}, expected one of: {', '.join(choices)}", _suggest(str(value), choices)
    wanted = fault.removeprefix("Expected ").split(", got ")[0].replace("`", "")
    if wanted == "object":
        return f"found {value!r}, expected a section", f"write [{'.'.join(path)}] and its keys below it"
    return f"found {value!r}, expected {wanted}", "correct the value"
