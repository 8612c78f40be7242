"""Chores: the same for everybody, told briefly, and worth what they are worth."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from agentrl.tasks import harbor
from agentrl.tasks.chores import KINDS, ChoresSource, chore, demo, generate
from agentrl.tasks.chores.folder import wait_of
from agentrl.tasks.chores.words import NAMES
from agentrl.tasks.order import EndlessOrder

ALL = sorted(KINDS)
GENUINELY_MULTI_TURN = {"find", "largest", "lookup", "note"}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_there_are_enough_kinds() -> None:
    assert len(KINDS) >= 12
    assert set(KINDS) >= GENUINELY_MULTI_TURN


def test_no_name_hides_in_another() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert not [(a, b) for a in NAMES for b in NAMES if a != b and a in b]


@pytest.mark.parametrize("kind", ALL)
def test_a_folder_is_a_pure_function_of_kind_and_seed(kind: str, tmp_path: Path) -> None:
    first, again = generate(kind, 7, tmp_path / "a"), generate(kind, 7, tmp_path / "b")
    assert contents(first) == contents(again)
    assert generate(kind, 7, tmp_path / "a") == first
    assert contents(generate(kind, 8, tmp_path / "a")) != contents(first)
    assert not list(tmp_path.glob("*/.*")), "scratch folders are gone"


def test_tests_wait_each_problem_its_own_time_with_a_tail() -> None:
    waits = sorted(wait_of(kind, seed, 1.0) for kind in ALL for seed in range(64))
    assert waits[len(waits) // 2] == pytest.approx(1.0, rel=0.1)
    assert sum(waits) / len(waits) == pytest.approx(1.6, rel=0.1)  # exp(1/2), less what the cap takes off
    assert waits[-1] <= 15.0  # within the verifier's time-out
    assert wait_of("copy", 1, 2.0) == 2 * wait_of("copy", 1, 1.0) == 2 * wait_of("copy", 1, 1.0)


def test_what_waits_is_the_hidden_test_alone(tmp_path: Path) -> None:
    at_once = contents(generate("copy", 3, tmp_path / "a"))
    waiting = contents(generate("copy", 3, tmp_path / "b", tests_wait_s=1.0))
    assert {path for path in at_once if at_once[path] != waiting[path]} == {"tests/test.sh"}
    line = f"sleep {wait_of('copy', 3, 1.0):.3f}\n".encode()
    assert waiting["tests/test.sh"][0].replace(line, b"") == at_once["tests/test.sh"][0]


@pytest.mark.parametrize("kind", ALL)
def test_a_folder_loads_as_any_harbor_task(kind: str, tmp_path: Path) -> None:
    task = harbor.load(generate(kind, 3, tmp_path))
    problem = chore(kind, 3)
    assert (task.kind, task.workdir, task.setup) == (kind, "/work", ())
    assert task.instruction == problem.instruction
    assert {target: (Path(task.root) / source).read_bytes() for source, target in task.files} == {
        f"/work/{path}": file.data for path, file in problem.files.items()
    }


@pytest.mark.parametrize("kind", ALL)
def test_instructions_and_commands_are_short(kind: str) -> None:
    for seed in range(20):
        assert len(chore(kind, seed).instruction) <= 80
        assert all(len(command) <= 60 and command[0] != "/" for command in demo(kind, seed))


@pytest.mark.parametrize("kind", sorted(GENUINELY_MULTI_TURN))
def test_the_last_command_needs_what_an_earlier_one_shows(kind: str) -> None:
    """Among problems told in the same words, or in words that leave the answer open, the answer varies."""
    for seed in range(20):
        problem = chore(kind, seed)
        assert len(problem.script) >= 2
        answer = set(problem.script[-1].replace(".", " ").split()) & set(NAMES)
        assert not answer <= set(problem.instruction.replace(".", " ").split())


def test_an_unknown_kind_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no chore 'nap'") as error:
        ChoresSource(tmp_path, kinds=("write", "nap"))
    assert "write" in error.value.hint


# --- the order --------------------------------------------------------------------------------------------------------


def test_every_round_offers_each_kind_once(tmp_path: Path) -> None:
    source = ChoresSource(tmp_path, instances=3, seed=1)
    for _ in range(4):
        assert sorted(task.kind for task in source.next_tasks(len(KINDS))) == ALL


def test_every_problem_comes_once_before_any_comes_again(tmp_path: Path) -> None:
    source = ChoresSource(tmp_path, kinds=("write", "sort"), instances=3, seed=1)
    epoch = [task.id for task in source.next_tasks(6)]
    assert len(set(epoch)) == 6
    assert {task.id for task in source.next_tasks(6)} == set(epoch)


def test_seeds_give_different_orders(tmp_path: Path) -> None:
    one, other = (ChoresSource(tmp_path, seed=seed).next_tasks(30) for seed in (1, 2))
    assert [task.id for task in one] != [task.id for task in other]


@given(st.integers(1, 40), st.integers(0, 5), st.lists(st.integers(0, 50), max_size=6))
def test_an_order_depends_on_seed_and_position_alone(size: int, seed: int, cuts: list[int]) -> None:
    whole = EndlessOrder(size, seed).take(sum(cuts) + size)
    assert sorted(whole[:size]) == list(range(size))
    pieces, skipping = EndlessOrder(size, seed), EndlessOrder(size, seed)
    for number, cut in enumerate(cuts):
        taken = pieces.take(cut)
        if number % 2:
            skipping.skip(cut)
        else:
            assert skipping.take(cut) == taken
    assert pieces.take(size) == skipping.take(size) == whole[sum(cuts) :]


def test_a_resumed_source_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    first, resumed = ChoresSource(tmp_path / "a", seed=5), ChoresSource(tmp_path / "b", seed=5)
    first.next_tasks(50)
    resumed.skip(50)
    assert [t.id for t in first.next_tasks(9)] == [t.id for t in resumed.next_tasks(9)]
    assert len(list((tmp_path / "b").iterdir())) == 9, "only what was offered is written"


def test_chores_say_that_they_may_run_without_isolation(tmp_path: Path) -> None:
    assert all(task.trusted for task in ChoresSource(tmp_path).next_tasks(3))


def test_kinds_use_no_randomness_but_the_generator_they_are_given() -> None:
    for kind, make in KINDS.items():
        assert make(Random(1)) == make(Random(1)), kind
        assert json.dumps(make(Random(1)).instruction)
