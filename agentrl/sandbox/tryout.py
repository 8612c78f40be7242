"""Whether a machine can contain sandboxes as a recipe asks: the backend tries itself and leaves nothing.

python -m agentrl.sandbox.tryout        the recipe's section as JSON on standard input; one JSON line comes out
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import msgspec

from agentrl.errors import AgentRLError
from agentrl.recipe.schema import Sandbox
from agentrl.sandbox.backends import make_backend


async def tried(sandbox: Sandbox) -> str:
    """What the backend isolates, in a line. Raises the backend's own UnavailableError or UserError."""
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as state:
        backend = make_backend(sandbox, state_dir=state)
        try:
            await backend.probe()
            return f"{backend.name}: {backend.isolation}"
        finally:
            await backend.aclose()


def main() -> None:
    try:
        said = {"isolation": asyncio.run(tried(msgspec.json.decode(sys.stdin.buffer.read(), type=Sandbox)))}
    except AgentRLError as exc:
        said = {"fault": str(exc), "hint": exc.hint}
    sys.stdout.write("\n" + msgspec.json.encode(said).decode() + "\n")


if __name__ == "__main__":
    main()
