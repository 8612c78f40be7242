"""How a box is contained: `namespace` by default, `bubblewrap` by choice, `process` for trusted tasks only."""

from __future__ import annotations

TYPE_CHECKING = False  # the launcher imports this package, and typing would cost memory and time in every box
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.sandbox.backends.base import Backend


def make_backend(name: str, *, root: str, state_dir: str, hide: Sequence[str] = ()) -> Backend:
    """A backend by its recipe name. root: lower layer of the boxes' file system. state_dir: a private folder of the
    daemon. hide: further host paths that no box may see. UserError for a name that is none.

    Imports are local: the launcher imports this package and must stay small.
    """
    from agentrl.errors import UserError

    if name == "namespace":
        from agentrl.sandbox.backends.namespace import NamespaceBackend

        return NamespaceBackend(root=root, state_dir=state_dir, hide=hide)
    if name == "bubblewrap":
        from agentrl.sandbox.backends.bubblewrap import BubblewrapBackend

        return BubblewrapBackend(root=root, state_dir=state_dir, hide=hide)
    if name == "process":
        from agentrl.sandbox.backends.process import ProcessBackend

        return ProcessBackend(state_dir=state_dir)
    raise UserError(f"sandbox.backend: no backend named {name!r}", hint="Use namespace, bubblewrap or process.")
