"""What is generated from the source is current, and every key and every command is documented."""

from __future__ import annotations

from scripts import recipe_reference


def test_the_table_of_recipe_keys_is_current() -> None:
    page = recipe_reference.PAGE.read_text()
    assert recipe_reference.placed(page) == page, "run: python scripts/recipe_reference.py --write"


def test_every_recipe_key_says_what_it_means() -> None:
    silent = [f"{section}.{field}" for (section, field), text in recipe_reference.meanings().items() if not text]
    nested = {"Sandbox.lanes"} | {f"Recipe.{name}" for name, _ in named_sections()}
    assert set(silent) <= nested, sorted(set(silent) - nested)


def named_sections() -> list[tuple[str, object]]:
    return [(title.strip("`[]"), kind) for title, kind in recipe_reference.sections(recipe_reference.schema.Recipe, "")]
