"""What the documents take from the source is current, and the source has something to say."""

from __future__ import annotations

import pytest

from scripts import module_map, recipe_reference, refresh_docs


@pytest.mark.parametrize("name", refresh_docs.PAGES)
def test_what_a_page_takes_from_the_source_is_current(name: str) -> None:
    page, fresh = refresh_docs.fresh(name)
    assert page == fresh, "run: make docs"


def test_every_recipe_key_says_what_it_means() -> None:
    silent = [key for key, meaning in recipe_reference.meanings().items() if not meaning]
    sections = {kind.__name__ for _, kind in recipe_reference.sections(recipe_reference.schema.Recipe, "")}
    wanted = [f"{section}.{name}" for section, name in silent if section in sections - {"Recipe"} and name != "lanes"]
    assert not wanted


def test_every_module_says_what_it_is_for() -> None:
    modules = [path for path in module_map.PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    silent = [str(path) for path in modules if module_map.purpose(path).startswith("(it does not")]
    assert not silent
