"""Boxes of images in which our init cannot run."""

from __future__ import annotations

from typing import Any

from agentrl.errors import TaskError
from agentrl.sandbox.backends.base import Box, BoxSpec
from agentrl.sandbox.backends.dockerd import Dockerd


async def start(spec: BoxSpec, dockerd: Dockerd, config: dict[str, Any], image: str) -> Box:
    raise TaskError(f"box {spec.id}: image {image} has no Python 3.9 or newer", hint="Build it on one that has.")
