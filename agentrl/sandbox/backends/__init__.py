"""How a box is contained: `namespace` by default, `docker` for images, `bubblewrap` by choice, `process` for trusted
tasks only."""

from __future__ import annotations

TYPE_CHECKING = False  # the launcher imports this package, and typing would cost memory and time in every box
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.recipe import schema
    from agentrl.sandbox.backends.base import Backend


def make_backend(sandbox: schema.Sandbox, *, state_dir: str, hide: Sequence[str] = ()) -> Backend:
    """The backend that a recipe's section asks for. state_dir: a private folder of the daemon. hide: further host paths
    that no box may see. UserError for a name that is none.

    Imports are local: the launcher imports this package and must stay small.
    """
    from agentrl.errors import UserError

    name, root = sandbox.backend, sandbox.root
    if name == "namespace":
        from agentrl.sandbox.backends.namespace import NamespaceBackend

        return NamespaceBackend(root=root, state_dir=state_dir, hide=hide)
    if name == "bubblewrap":
        from agentrl.sandbox.backends.bubblewrap import BubblewrapBackend

        return BubblewrapBackend(root=root, state_dir=state_dir, hide=hide)
    if name == "docker":
        from agentrl.sandbox.backends.docker import DockerBackend

        return DockerBackend(sandbox.docker, image=sandbox.image, state_dir=state_dir)
    if name == "process":
        from agentrl.sandbox.backends.process import ProcessBackend

        return ProcessBackend(state_dir=state_dir)
    raise UserError(f"sandbox.backend: no backend named {name!r}", hint="Use namespace, bubblewrap, docker or process.")
