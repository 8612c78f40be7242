"""The error tree. Whoever stands at a boundary converts once; `classify` says whose fault it is.

    AgentRLError
    ├── UserError            the recipe, the command line, a file the user named        exit 2
    │   └── RecipeError      with the TOML path
    ├── UnavailableError     a host or a dependency is not there                        exit 3
    ├── NoProgressError      a deadline passed with nothing moving; names who           exit 4
    ├── InfraError           a process, host or network failed under an attempt: retry
    │   ├── EngineLost       the engine is gone or answers nonsense
    │   ├── SandboxLost      the sandbox (or its daemon) is gone, with its state
    │   ├── ReplayDiverged   the commands gave another result in a fresh sandbox: start over
    │   └── DeadlineError    a call to a port did not end in its time
    ├── TaskError            the task's own folder, set-up or verifier is broken: drop, quarantine
    └── DataError            stored data does not match its checksum or its schema

Anything else is a bug. Every message names what, where, and what to do next.
"""

from __future__ import annotations

import asyncio

from agentrl.records import Blame


class AgentRLError(Exception):
    """`hint` is the remedy: one sentence, imperative."""

    exit_code = 1
    blame = Blame.BUG

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UserError(AgentRLError):
    exit_code = 2
    blame = Blame.USER


class RecipeError(UserError):
    """`where` is the file and TOML path, e.g. `recipes/local.toml: window.groups`."""

    def __init__(self, where: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{where}: {message}", hint=hint)
        self.where = where


class UnavailableError(AgentRLError):
    exit_code = 3
    blame = Blame.INFRA


class NoProgressError(AgentRLError):
    exit_code = 4
    blame = Blame.INFRA


class InfraError(AgentRLError):
    """`resumable`: the next try may go on from the durable turns of this one."""

    blame = Blame.INFRA
    resumable = True


class EngineLost(InfraError):
    pass


class EngineTorn(EngineLost):
    """Its weights are partly of one version and partly of another: it must be started anew."""


class SandboxLost(InfraError):
    pass


class ReplayDiverged(InfraError):
    resumable = False


class DeadlineError(InfraError):
    pass


class TaskError(AgentRLError):
    blame = Blame.TASK


class DataError(AgentRLError):
    exit_code = 1
    blame = Blame.INFRA


def classify(exc: BaseException) -> Blame:
    """Whose fault: ours unless a boundary said otherwise. Bare time-outs and broken connections are infra."""
    if isinstance(exc, AgentRLError):
        return exc.blame
    if isinstance(exc, (asyncio.TimeoutError, TimeoutError, ConnectionError)):
        return Blame.INFRA
    return Blame.BUG
