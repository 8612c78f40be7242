"""TOML to a typed recipe. Strict: a key nobody reads is an error, named with its path and the nearest valid one."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
    table: Any = document
    for part in path[:-1]:
        if isinstance(table, list):  # of sections that have names
            inner = next((item for item in table if isinstance(item, dict) and item.get("name") == part), None)
        else:
            inner = table.setdefault(part, {})
        if inner is None:
            raise RecipeError(f"--set {override}", f"there is no {part}")
        if not isinstance(inner, dict | list):
            raise RecipeError(f"--set {override}", f"{part} is a value, not a section")
        table = inner
    if isinstance(table, list):
        raise RecipeError(f"--set {override}", "names a section, not a key of it")
    table[path[-1]] = _value(text.strip())
    return path


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word


def _convert(kind: type[R], document: Mapping[str, Any], where: Where) -> R:
    for path, known in _unknown(document, kind, ()):
        raise RecipeError(where(_named(document, path)), "unknown key", hint=_suggest(path[-1], known))
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as exc:
        match = _CONVERSION.fullmatch(str(exc))
        assert match is not None
        path = tuple(re.findall(r"\w+", match["path"] or ""))
        message, hint = _fault(kind, match["fault"], document, path)
        raise RecipeError(where(_named(document, path)), message, hint=hint) from exc


def _named(document: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """`path` with the name of a list's section, if it has one, in place of its index; it ends at other lists."""
    value: Any = document
    for at, part in enumerate(path):
        if not isinstance(value, list):
            value = value.get(part)
        elif not isinstance(value[int(part)], Mapping):
            return path[:at]
        else:
            value = value[int(part)]
            path = (*path[:at], str(value.get("name", part)), *path[at + 1 :])
    return path


def _unknown(
    table: Mapping[str, Any], section: type[Section], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    hints = get_type_hints(section)
    for key, value in table.items():
        if key not in section.__struct_fields__:
            yield (*path, key), list(section.__struct_fields__)
        elif isinstance(value, Mapping) and _is_section(hints[key]):
            yield from _unknown(value, hints[key], (*path, key))
        elif isinstance(value, list) and get_args(hints[key]) and _is_section(inner := get_args(hints[key])[0]):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from _unknown(item, inner, (*path, key, str(index)))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


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
        if isinstance(value, list):
            kind = get_args(kind)[0]
            if not _is_section(kind):
                break
            value = value[int(part)]
        else:
            value, kind = value[part], get_type_hints(kind)[part]
    if get_origin(kind) in (Union, UnionType):
        words = [word for part in get_args(kind) if get_origin(part) is Literal for word in get_args(part)]
        return f"found {value!r}, expected a whole number or {' or '.join(words)}", "correct the value"
    if isinstance(value, list) and get_origin(kind) is Literal:
        value = next((item for item in value if item not in get_args(kind)), value)
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return f"found {value!r}, expected one of: {', '.join(choices)}", _suggest(str(value), choices)
    wanted = fault.removeprefix("Expected ").split(", got ")[0].replace("`", "")
    if wanted == "object" and path[-1].isdigit():
        return f"found {value!r}, expected a section", f"write [[{path[0]}]] and its keys below it"
    if wanted == "object":
        return f"found {value!r}, expected a section", f"write [{'.'.join(path)}] and its keys below it"
    if wanted == "array" and isinstance(value, Mapping):
        return f"found {value!r}, expected several sections", f"write [[{'.'.join(path)}]] for each of them"
    return f"found {value!r}, expected {wanted}", "correct the value"
