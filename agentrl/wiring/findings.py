"""What an examination finds, one line each."""

from __future__ import annotations

from typing import Literal

from agentrl.records import Record


class Finding(Record):
    """users: the recipe, or a file that it names, is wrong (exit 2); otherwise the machine is (exit 3). host: of the
    recipe's inventory; empty: this machine."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""
    users: bool = False
    host: str = ""


def ok(name: str, detail: str) -> Finding:
    return Finding(name=name, state="ok", detail=detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, state="warn", detail=detail, remedy=remedy)


def fail(name: str, detail: str, remedy: str, *, users: bool = False) -> Finding:
    return Finding(name=name, state="fail", detail=detail, remedy=remedy, users=users)
