"""The recipe's keys as Markdown tables, from agentrl/recipe/schema.py, comments included. See refresh_docs.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta, structs

from agentrl.recipe import schema

PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """Markdown: one table for each section of the recipe."""
    said = meanings()
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    tables = [
        "\n".join([f"### {title}", "", *intro(section), *head, *rows])
        for title, section in sections(schema.Recipe, "")
        if (rows := list(keys(section, said)))
    ]
    return "\n\n".join(tables) + "\n"


def sections(section: type[schema.Section], path: str) -> Iterator[tuple[str, type[schema.Section]]]:
    yield (f"`[{path}]`" if path else "At the top", section)
    for name, kind in get_type_hints(section).items():
        if is_section(kind):
            yield from sections(kind, f"{path}.{name}".lstrip("."))
        elif (inner := get_args(kind)) and is_section(inner[0]):
            yield f"`[[{name}]]`", inner[0]


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, schema.Section)


def intro(section: type[schema.Section]) -> list[str]:
    own = section.__doc__ or ""
    return [" ".join(own.split()), ""] if own and section is not schema.Recipe else []


def keys(section: type[schema.Section], said: dict[tuple[str, str], str]) -> Iterator[str]:
    hints = get_type_hints(section, include_extras=True)
    for field in structs.fields(section):
        kind = hints[field.name]
        if is_section(kind) or any(map(is_section, get_args(kind))):
            continue
        default = "required" if field.required else f"`{toml(default_of(field))}`"
        meaning = said[section.__name__, field.name].replace("|", "\\|")
        yield f"| `{field.name}` | {words(kind, field.name)} | {default} | {meaning} |"


def words(kind: Any, name: str) -> str:
    """A type as people say it, with its unit and its bounds."""
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(f"`{toml(choice)}`" for choice in get_args(kind))
    if origin in (UnionType, Union):
        return " or ".join(words(part, name) for part in get_args(kind))
    if origin is tuple:
        inner = get_args(kind)
        if get_origin(inner[0]) is Literal:
            return f"list of {words(inner[0], name)}"
        what = PLAIN[inner[0]]
        return f"list of {what}s" if Ellipsis in inner else f"{len(inner)} {what}s"
    if origin is dict:
        return f"table of {PLAIN[get_args(kind)[1]]}s"
    if origin is not Annotated:
        return PLAIN[kind]
    plain, meta = get_args(kind)
    assert isinstance(meta, Meta)
    what = "seconds" if name.endswith("_s") else PLAIN[plain]
    bounds = [f"{sign} {limit:g}" for at, sign in BOUNDS.items() if (limit := getattr(meta, at)) is not None]
    return f"{what} {', '.join(bounds)}"


def default_of(field: structs.FieldInfo) -> Any:
    return field.default_factory() if field.default is NODEFAULT else field.default


def toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(toml(v) for v in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def choice(line: str) -> str:
    """`word   what it does` is one of several choices: a line of its own."""
    return re.sub(r"^(\S+) {2,}", r"<br>`\1`: ", line)


def meanings() -> dict[tuple[str, str], str]:
    """(class, field) -> its comment: the whole lines above it and the one behind it."""
    source = Path(schema.__file__).read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                above: list[str] = []
                first = field.lineno - 2
                while lines[first].strip().startswith("#"):
                    above.insert(0, choice(lines[first].strip().lstrip("# ")))
                    first -= 1
                end = field.end_col_offset or 0
                behind = lines[(field.end_lineno or field.lineno) - 1].encode()[end:].decode().strip().lstrip("# ")
                found[node.name, field.target.id] = " ".join(filter(None, [*above, behind])).removeprefix("<br>")
    return found
