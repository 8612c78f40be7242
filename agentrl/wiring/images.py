"""The images that a recipe's tasks run in: which there must be, which are not there, and how they come to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from agentrl.errors import UnavailableError, UserError
from agentrl.recipe.schema import Recipe
from agentrl.records import Task
from agentrl.sandbox import images
from agentrl.tasks.harbor import HarborSource
from agentrl.tasks.images import REPOSITORY

BUILD_S = 1_800.0  # of one image


async def build(recipe: Recipe, said: Callable[[str], None], *, timeout_s: float = BUILD_S) -> tuple[int, int]:
    """Builds what this machine's engine lacks of the images that task folders describe: how many, of how many.
    UserError where the recipe's sandboxes are no containers, or a folder names a ready image that is not here."""
    if recipe.sandbox.backend != "docker":
        raise UserError(
            f"sandbox.backend: {recipe.sandbox.backend} takes no images", hint='Set sandbox.backend = "docker".'
        )
    folders = _folders(recipe)
    absent = await images.missing(recipe.sandbox.docker, folders)
    if ready := [name for name in absent if not name.startswith(f"{REPOSITORY}:")]:
        raise UserError(
            f"{folders[ready[0]].parent}/task.toml: this machine's engine has no image {ready[0]}",
            hint="`docker pull` it, or remove the key and let the Dockerfile be built.",
        )
    for number, name in enumerate(absent, 1):
        said(f"{number}/{len(absent)} {folders[name].parent.name}: {name}")
        await images.build(recipe.sandbox.docker, folders[name], name, timeout_s=timeout_s)
    return len(absent), len(folders)


async def require(recipe: Recipe, tasks: Iterable[Task]) -> None:
    """UserError where the sandboxes are to be containers of this machine's engine and it lacks an image of theirs. An
    engine that does not answer is its daemon's to tell."""
    section = recipe.sandbox
    if section.backend != "docker" or section.attach or recipe.hosts:
        return
    names = sorted({task.image for task in tasks})
    try:
        absent = await images.missing(section.docker, names)
    except UnavailableError:
        return
    if absent:
        raise UserError(
            f"tasks.path: {len(absent)} of {len(names)} images are not on this machine's engine, {absent[0]} first",
            hint="`agentrl sandbox build` with this recipe makes those of task folders; `docker pull` fetches others.",
        )


def _folders(recipe: Recipe) -> dict[str, Path]:
    """Image to the folder that describes it. Chores need none of their own: they run in sandbox.image."""
    if recipe.tasks.source != "harbor":
        return {}
    source = HarborSource(Path(recipe.tasks.path), seed=recipe.seed, images=True)
    return {task.image: Path(task.root) / "environment" for task in source.tasks}
