"""What the docker backend does without an engine: idle containers, their pace, names of images, rules of the recipe."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UnavailableError, UserError
from agentrl.recipe.check import check
from agentrl.recipe.schema import Recipe, Sandbox, Tasks
from agentrl.sandbox.backends import container
from agentrl.sandbox.backends.dockerd import Dockerd
from agentrl.sandbox.backends.inside import seccomp
from agentrl.sandbox.backends.warm import Pace, Shelf
from agentrl.tasks import harbor
from agentrl.tasks.images import tag_of
from agentrl.wiring import images


@given(st.integers(0, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60))
def test_a_shelf_keeps_its_cap_and_loses_nothing(cap: int, acts: list[tuple[bool, int]]) -> None:
    shelf: Shelf[int, tuple[int, int]] = Shelf(cap)
    inside: set[tuple[int, int]] = set()
    for number, (put, kind) in enumerate(acts):
        if put:
            inside.add((kind, number))
            inside -= set(shelf.put(kind, (kind, number)))
        elif (taken := shelf.take(kind)) is not None:
            assert taken[0] == kind
            assert taken == max(thing for thing in inside if thing[0] == kind)  # the one used last
            inside.remove(taken)
        else:
            assert not any(thing[0] == kind for thing in inside)
        assert len(shelf) == len(inside) <= cap


def test_what_a_shelf_gives_up_is_of_the_kind_unused_for_longest() -> None:
    shelf: Shelf[str, int] = Shelf(2)
    assert shelf.put("old", 1) == shelf.put("new", 2) == []
    assert shelf.put("new", 3) == [1]


def test_the_pace_holds_both_limits() -> None:
    at_once, per_s, count = 3, 200.0, 20

    async def run() -> list[float]:
        loop, pace, running, began = asyncio.get_running_loop(), Pace(at_once, per_s, seed=1), 0, []

        async def one() -> None:
            nonlocal running
            async with pace.turn():
                began.append(loop.time())
                running += 1
                assert running <= at_once
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(one() for _ in range(count)))
        return began

    began = asyncio.run(run())
    assert began[-1] - began[0] >= 0.5 * (count - 1) / per_s  # a gap is at least half of the mean


def test_a_cancelled_wait_takes_no_turn() -> None:
    async def run() -> None:
        pace = Pace(1, 1e6)
        async with pace.turn():
            waiting = asyncio.ensure_future(pace.turn().__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with asyncio.timeout(10), pace.turn():
            pass

    asyncio.run(run())


def environment(folder: Path) -> Path:
    inner = folder / "environment"
    (inner / "data").mkdir(parents=True)
    (inner / "Dockerfile").write_text("ARG X\nFROM scratch\n")
    (inner / "data" / "a").write_text("1")
    return inner


def test_an_images_name_follows_its_folders_content(tmp_path: Path) -> None:
    one, same = environment(tmp_path / "1"), environment(tmp_path / "2")
    names = [tag_of(one)]
    assert tag_of(same) == names[0]
    for change in (
        lambda: (one / "data" / "a").write_text("2"),
        lambda: (one / "data" / "a").chmod(0o755),
        lambda: (one / "data" / "a").rename(one / "data" / "b"),
        lambda: (one / "data" / "c").symlink_to("b"),
        lambda: (one / "empty").mkdir(),
    ):
        change()
        names.append(tag_of(one))
    assert len(set(names)) == len(names)
    assert all(name.startswith("agentrl-task:") for name in names)


def task_folder(folder: Path, toml: str = "") -> Path:
    environment(folder)
    (folder / "tests").mkdir()
    for name, text in {"task.toml": toml, "instruction.md": "Do it.", "tests/test.sh": "true"}.items():
        (folder / name).write_text(text)
    return folder


def test_for_containers_any_dockerfile_will_do(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "t")
    task = harbor.load(folder, images=True)
    assert (task.image, task.workdir, task.env, task.setup, task.files) == (
        tag_of(folder / "environment"), "", {}, (), ()
    )  # fmt: skip
    named = task_folder(tmp_path / "u", '[environment]\ndocker_image = "mine:1"\nworkdir = "/here"\n')
    ready = harbor.load(named, images=True)
    assert (ready.image, ready.workdir) == ("mine:1", "/here")


def recipe(**sandbox: str) -> Recipe:
    return Recipe(name="r", sandbox=Sandbox(**sandbox))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (recipe(backend="docker"), "sandbox.image"),
        (recipe(image="x"), "sandbox.image"),
        (recipe(backend="docker", image="x", root="/elsewhere"), "sandbox.root"),
    ],
)
def test_a_recipe_that_cannot_work_is_told_so(wrong: Recipe, where: str) -> None:
    [problem] = [p for p in check(wrong) if p.where.startswith("sandbox.") and p.fatal]
    assert problem.where == where
    assert problem.hint


def test_a_recipe_of_containers_is_fine(tmp_path: Path) -> None:
    for fine in (
        recipe(backend="docker", image="x"),
        Recipe(name="r", sandbox=Sandbox(backend="docker"), tasks=Tasks(source="harbor", path=str(tmp_path))),
    ):
        assert not [p for p in check(fine) if p.where.startswith("sandbox.") and p.fatal]


def test_only_containers_have_images_to_build() -> None:
    with pytest.raises(UserError, match="takes no images"):
        asyncio.run(images.build(recipe(), print))


def test_the_filter_of_calls_jumps_to_its_own_steps_only() -> None:
    """The kernel refuses a program with a jump out of it only when it is installed, in a container."""
    program = seccomp._PROGRAM
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    assert len(steps) < 4096
    for at, (code, yes, no, _) in enumerate(steps):
        if code & 0x07 == 0x05:  # a jump
            assert at + 1 + max(yes, no) < len(steps)
    assert steps[-1][0] == 0x06  # and it ends with an answer


@pytest.mark.parametrize("ends", ["hello", "no interpreter", "cancelled"])
def test_a_hello_leaves_no_reader_to_descriptors_that_are_closed_next(tmp_path: Path, ends: str) -> None:
    """Their numbers go to whoever opens something next; a reader taken away later would be that one's."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with (
            container._listening(tmp_path) as listener,
            container._word(tmp_path) as word,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as init,
        ):
            if ends == "hello":
                init.connect(str(tmp_path / "s"))
                (await container._hello("c", listener, word)).close()  # in this very task: no turn of the loop between
            elif ends == "no interpreter":
                (tmp_path / "word").write_bytes(b"none")
                with pytest.raises(container.NoInterpreter):
                    await container._hello("c", listener, word)
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await container._hello("c", listener, word)
            assert not loop.remove_reader(word)
            assert not loop.remove_reader(listener)

    asyncio.run(scenario())


class Podman:
    """Podman 4.3's words, where they are not Docker's."""

    def __init__(self) -> None:
        self.waited = ""

    def remove_container(self, name: str, **_: Any) -> None:
        import docker.errors
        import requests

        answer = requests.Response()
        answer.status_code = 500
        raise docker.errors.APIError("cannot remove it", answer, "container state improper: stopped")

    def wait(self, name: str, *, condition: str) -> None:
        self.waited = f"{name} {condition}"

    def inspect_image(self, image: str) -> None:
        import docker.errors

        raise docker.errors.ImageNotFound("404", explanation=f"failed to find image {image}: No such image")


def test_podman_is_understood() -> None:
    async def check() -> None:
        engine = Dockerd("unix:///podman.sock", timeout_s=5.0)
        engine._client = podman = Podman()
        await engine.remove("box")  # it is being removed by itself
        assert podman.waited == "box removed"
        with pytest.raises(UnavailableError, match="No such image: failed to find image absent:latest"):
            await engine.image_id("absent:latest")
        engine._threads.shutdown()

    pytest.importorskip("docker")
    asyncio.run(check())
