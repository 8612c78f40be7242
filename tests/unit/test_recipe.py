"""Recipes: what is wrong is named with its place and its remedy; what is right survives a round trip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RecipeError
from agentrl.recipe.check import check
from agentrl.recipe.load import load
from agentrl.recipe.schema import Batch, Engines, Freshness, HostSpec, Model, Publish, Recipe, Rollout, Tasks, Window
from agentrl.recipe.show import dump

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "r.toml"


def refused(file: Path, text: str, *overrides: str) -> tuple[str, str]:
    """(message with the folder cut off, hint) of the error."""
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load(file, overrides=overrides)
    return str(caught.value).replace(f"{file.parent}/", ""), caught.value.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "r.toml: name is missing", 'name = "local"'),
        ("nmae = 'a'", "r.toml: nmae: unknown key", "did you mean name?"),
        ("name = 'a'\n[window]\ngruops = 3", "r.toml: window.gruops: unknown key", "did you mean groups?"),
        ("name = 'a'\n[windw]\ngroups = 3", "r.toml: windw: unknown key", "did you mean window?"),
        ("name = 'a'\n[freshness]\nk = 3", "r.toml: freshness.k: unknown key", "valid here: K, when_stale"),
        ("name = 'a'\n[sandbox.lanes]\npakage = 1", "r.toml: sandbox.lanes.pakage: unknown key", "package"),
        ("name = 'a'\n[sandbox.lane]\npackage = 1", "r.toml: sandbox.lane: unknown key", "lanes"),
        ("name = 'a'\n[model]\nzzz = 1", "r.toml: model.zzz: unknown key", "valid here: path, context_tokens"),
        ("name = 3", "r.toml: name: found 3, expected str", ""),
        ("name = 'a'\n[batch]\ngroups = '4'", "r.toml: batch.groups: found '4', expected int", ""),
        ("name = 'a'\n[batch]\ngroups = 4.5", "r.toml: batch.groups: found 4.5, expected int", ""),
        ("name = 'a'\n[batch]\ngroups = true", "r.toml: batch.groups: found True, expected int", ""),
        ("name = 'a'\n[batch]\ngroups = 0", "r.toml: batch.groups: found 0, expected int >= 1", ""),
        ("name = 'a'\n[freshness]\nK = -1", "r.toml: freshness.K: found -1, expected int >= 0", ""),
        ("name = 'a'\n[rollout]\ntop_p = 2", "r.toml: rollout.top_p: found 2, expected float <= 1.0", ""),
        ("name = 'a'\n[train]\nlr = nan", "r.toml: train.lr: found nan, expected float > 0.0", ""),
        ("name = 'a'\n[train]\nbetas = [0.9]", "r.toml: train.betas: found [0.9], expected array of length 2", ""),
        ("name = 'a'\n[tasks]\nkinds = ['a', 3]", "r.toml: tasks.kinds: found ['a', 3], expected str", ""),
        ("name = 'a'\nbatch = 3", "r.toml: batch: found 3, expected a section", "[batch]"),
        ("name = 'a'\n[engines]\nkind = 'sglan'", "found 'sglan', expected one of: embedded, sglang", "sglang"),
        ("name = 'a'\n[[hosts]]\nname = 'h'\nusr = 'x'", "r.toml: hosts.h.usr: unknown key", "user"),
        ("name = 'a'\n[[hosts]]\nport = 1", "r.toml: hosts.0: name is missing", "name = "),
        ("name = 'a'\n[[hosts]]\nname = 'h'\nport = 'x'", "r.toml: hosts.h.port: found 'x', expected int", ""),
        (
            "name = 'a'\n[[hosts]]\nname = 'h'\nroles = ['engine']",
            "hosts.h.roles: found 'engine', expected one of",
            "engines",
        ),
        ("name = 'a'\n[hosts]\nname = 'h'", "r.toml: hosts: found {'name': 'h'}, expected several", "[[hosts]]"),
        ("name = 'a'\nhosts = ['h']", "r.toml: hosts: found 'h', expected a section", "[[hosts]]"),
        ("name = 'a'\n[batch\n", "r.toml: not valid TOML: Expected ']'", "line"),
        ("name = 'a'\nname = 'b'", "Cannot overwrite a value", "line"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, message: str, hint: str) -> None:
    found, remedy = refused(file, text)
    assert message in found
    assert hint in remedy
    assert remedy


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("engines.knd=sglang", "--set engines.knd=sglang: unknown key", "did you mean kind?"),
        ("engines.kind", "not of the form a.b=c", "--set batch.groups=8"),
        (".groups=1", "not of the form a.b=c", "--set batch.groups=8"),
        ("steps=many", "--set steps=many: found 'many', expected int", ""),
        ("name.x=1", "name is a value, not a section", ""),
        ("window.groups=atuo", "found 'atuo', expected a whole number or auto", "correct the value"),
        ("window.groups=2", "--set window.groups=2: 2 open groups can never fill a batch of 4", "at least 4"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_written(file: Path, override: str, message: str, hint: str) -> None:
    found, remedy = refused(file, "name = 'a'", override)
    assert message in found
    assert hint in remedy


def test_overrides_take_toml_and_bare_words(file: Path) -> None:
    file.write_text("name = 'a'\n[batch]\ngroups = 2")
    recipe = load(
        file,
        overrides=["engines.kind=sglang", "batch.siblings = 4", "train.lr=1e-5", "tasks.kinds=['x']", "name='b'"],
    )
    assert (recipe.engines.kind, recipe.batch, recipe.train.lr) == ("sglang", Batch(groups=2, siblings=4), 1e-5)
    assert (recipe.tasks.kinds, recipe.name) == (("x",), "b")


def test_an_override_finds_a_host_by_its_name(file: Path) -> None:
    text = "name = 'a'\n[[hosts]]\nname = 'g'\n[[hosts]]\nname = 'h'"
    file.write_text(text)
    assert [host.port for host in load(file, overrides=["hosts.h.port=9"]).hosts] == [0, 9]
    assert refused(file, text, "hosts.x.port=9")[0] == "--set hosts.x.port=9: there is no x"
    assert refused(file, text, "hosts.h.prt=9") == ("--set hosts.h.prt=9: unknown key", "did you mean port?")
    assert "names a section" in refused(file, text, "hosts.h=9")[0]


def test_a_missing_file_names_its_neighbour(file: Path) -> None:
    file.write_text("name = 'a'")
    with pytest.raises(RecipeError, match="no such file") as caught:
        load(file.with_name("rr.toml"))
    assert caught.value.hint == f"did you mean {file}?"
    with pytest.raises(RecipeError, match="cannot be read"):
        load(file.parent)


def test_bytes_that_are_no_text(file: Path) -> None:
    file.write_bytes(b"name = '\xff'")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(file)


# --- rules between keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"batch": Batch(siblings=1)}, "batch.siblings"),
        ({"window": Window(groups=3)}, "window.groups"),
        ({"rollout": Rollout(max_new_tokens=1024)}, "rollout.max_new_tokens"),
        ({"model": Model(context_tokens=10_000)}, "train.micro_tokens"),
        ({"engines": Engines(kv_tokens=512)}, "engines.kv_tokens"),
        ({"engines": Engines(kv_tokens=0)}, "engines.kv_tokens"),
        ({"engines": Engines(draft_tokens=3)}, "engines.draft_tokens"),
        ({"engines": Engines(kind="sglang", ranks=2, gpus=3)}, "engines.gpus"),
        ({"engines": Engines(kind="sglang", gpus=4, experts_over=3)}, "engines.experts_over"),
        ({"engines": Engines(attach=("http://a",))}, "engines.attach"),
        ({"engines": Engines(request_timeout_s=900.0)}, "sandbox.lease_s"),
        ({"publish": Publish(transfer="distributed")}, "publish.transfer"),
        (
            {
                "engines": Engines(kind="sglang", attach=("http://a", "http://b")),
                "publish": Publish(transfer="distributed"),
            },
            "publish.transfer",
        ),
        (
            {
                "engines": Engines(kind="sglang"),
                "hosts": (HostSpec(name="h"),),
                "publish": Publish(transfer="distributed"),
            },
            "publish.address",
        ),
        ({"tasks": Tasks(source="harbor")}, "tasks.path"),
        ({"hosts": (HostSpec(name="a b"),)}, "hosts"),
        ({"hosts": (HostSpec(name="h"), HostSpec(name="h"))}, "hosts.h"),
        ({"hosts": (HostSpec(name="h", roles=("sandbox",)),)}, "hosts"),
        ({"hosts": (HostSpec(name="h", roles=("engines",)),)}, "hosts"),
        ({"hosts": (HostSpec(name="g"), HostSpec(name="h", roles=("sandbox",), engines=1))}, "hosts.h.engines"),
        ({"hosts": (HostSpec(name="h", home="here"),)}, "hosts.h.home"),
        ({"hosts": (HostSpec(name="h", engines=1),)}, "engines.count"),
        ({"hosts": (HostSpec(name="h", engines=3),)}, "engines.count"),
        ({"tasks": Tasks(source="harbor", path="x", kinds=("a",))}, "tasks.kinds"),
    ],
)
def test_what_cannot_work_is_refused(file: Path, section: dict[str, Any], where: str) -> None:
    recipe = Recipe(**{"name": "a", **section})
    assert where in [problem.where for problem in check(recipe) if problem.fatal]
    file.write_text(dump(recipe))
    with pytest.raises(RecipeError) as caught:
        load(file)
    assert caught.value.hint
    assert load(file, checked=False) == recipe


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"window": Window(groups=4)}, "window.groups"),
        ({"freshness": Freshness(K=3)}, "freshness.K"),
        ({"window": Window(attempts=8)}, "window.attempts"),
        ({"rollout": Rollout(max_new_tokens=512)}, "rollout.max_turns"),
        ({"engines": Engines(slots=1_000)}, "engines.kv_tokens"),
    ],
)
def test_what_is_doubtful_is_only_said(section: dict[str, Any], where: str) -> None:
    problems = check(Recipe(**{"name": "a", **section}))
    assert where in [problem.where for problem in problems]
    assert not any(problem.fatal for problem in problems)


def test_the_defaults_are_beyond_doubt() -> None:
    assert [problem.where for problem in check(Recipe(name="a"))] == []


def test_engines_are_shared_out_over_hosts() -> None:
    hosts = (
        HostSpec(name="a", roles=("engines",)),
        HostSpec(name="b", roles=("engines",), engines=3),
        HostSpec(name="c", roles=("sandbox",)),
        HostSpec(name="d"),
    )
    recipe = Recipe(name="r", hosts=hosts, engines=Engines(count=6))
    assert recipe.engine_hosts == ("a", "a", "b", "b", "b", "d")
    assert recipe.sandbox_hosts == ("c", "d")
    assert not any(problem.fatal for problem in check(recipe))
    alone = Recipe(name="r")
    assert (alone.engine_hosts, alone.sandbox_hosts) == (("", ""), ("",))


# --- round trip ------------------------------------------------------------------------------------------------------


@given(st.builds(Rollout, system=st.text(), temperature=st.floats(0.1, 2.0), max_turns=st.integers(1, 99)))
def test_a_dumped_recipe_loads_as_itself(rollout: Rollout) -> None:
    import tomllib

    recipe = Recipe(name="a", rollout=rollout)
    assert msgspec.convert(tomllib.loads(dump(recipe)), Recipe) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_load_without_a_problem(path: Path, file: Path) -> None:
    recipe = load(path)
    assert check(recipe) == []
    file.write_text(dump(recipe))
    assert load(file) == recipe


def test_there_is_a_recipe_for_this_machine() -> None:
    assert "local.toml" in [path.name for path in RECIPES]


def test_reading_a_recipe_needs_no_torch() -> None:
    code = "import sys, agentrl.recipe.load, agentrl.recipe.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
