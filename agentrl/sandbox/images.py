"""Images of task folders, made by the engine that will run them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.errors import TaskError, UnavailableError
from agentrl.recipe import schema
from agentrl.sandbox.backends.dockerd import Dockerd

LABEL = "agentrl.task"  # of each image that is built here: its folder's name


async def missing(settings: schema.Docker, names: Iterable[str]) -> list[str]:
    """Which of these images the engine lacks. UnavailableError where no engine answers."""
    dockerd = Dockerd(settings.url, timeout_s=settings.call_timeout_s)
    try:
        listed = await dockerd.call("list images", lambda client: client.images())
    finally:
        dockerd.close()
    there = {tag for image in listed for tag in image.get("RepoTags") or ()}
    there |= {digest for image in listed for digest in (*(image.get("RepoDigests") or ()), image["Id"])}
    return [name for name in names if not {name, f"{name}:latest"} & there]


async def build(settings: schema.Docker, environment: Path, name: str, *, timeout_s: float) -> None:
    """`name` from the Dockerfile in `environment`. A base image that is here is used as it is; another is the engine's
    to pull. TaskError with the engine's last words where the build fails."""
    dockerd = Dockerd(settings.url, timeout_s=settings.call_timeout_s)

    def act(client: Any) -> None:
        said = ""
        lines = client.build(
            path=str(environment), tag=name, rm=True, forcerm=True, decode=True, timeout=timeout_s,
            labels={LABEL: environment.parent.name}, network_mode=settings.network,
        )  # fmt: skip
        with contextlib.closing(lines):
            for line in lines:
                if "error" in line:
                    raise TaskError(
                        f"{environment}/Dockerfile: {line['error'].strip()}{said}",
                        hint="Correct it. Where no registry can be reached, give a local image the name that its FROM "
                        "asks for: `docker import` or `docker tag`.",
                    )
                said = f" (after {line['stream'].strip()[-200:]!r})" if line.get("stream", "").strip() else said

    try:
        await dockerd.call(f"build {environment.parent.name}", act, timeout_s=timeout_s)
    except UnavailableError as e:
        raise UnavailableError(f"{environment}: {e}", hint=e.hint) from e
    finally:
        dockerd.close()
