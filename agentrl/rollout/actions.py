"""What a reply asks for. A pure function of its text: never raises, and a reply nobody can act on is data.

The tool-call format is GLM's:

    <tool_call>shell
    <arg_key>command</arg_key>
    <arg_value>ls -l</arg_value>
    </tool_call>

Thinking before `</think>` is not looked at. A reply without a tool call is the final answer.
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.records import Record

TOOL = "shell"
ARGUMENT = "command"

SHELL_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Run a command in the sandbox's shell and return its output.",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": "The command line."}},
            "required": [ARGUMENT],
        },
    },
}
"""For chat templates that describe the tools to the model."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


class Run(Record):
    command: str


class Submit(Record):
    answer: str


class Malformed(Record):
    """`reason` is shown to the model as the observation."""

    reason: str


Action = Run | Submit | Malformed


def parse(text: str, *, cut: bool = False) -> Action:
    """`text`: the reply, stop token removed. `cut`: it ended at the token limit, not by the model's own stop."""
    if cut:
        return Malformed(reason="The reply was cut at its token limit. Answer with one short tool call.")
    _, closed, said = text.rpartition("</think>")
    if not closed and "<think>" in said:
        return Malformed(reason="The thinking was never closed with </think>.")
    calls = _CALL.findall(said)
    outside = _CALL.sub("", said)
    if "<tool_call>" in outside or "</tool_call>" in outside:
        return Malformed(reason="A tool call was opened and not closed, or closed and not opened.")
    if not calls:
        return Submit(answer=said.strip())
    if len(calls) > 1:
        return Malformed(reason=f"{len(calls)} tool calls in one reply. Make one at a time.")
    return _call(calls[0])


def _call(body: str) -> Action:
    name, opened, rest = body.partition("<arg_key>")
    name, rest = name.strip(), opened + rest
    if name != TOOL:
        return Malformed(reason=f"There is no tool {_quoted(name)}. The only tool is {TOOL}.")
    arguments: dict[str, str] = {}
    position = 0
    while position < len(rest):
        match = _ARGUMENT.match(rest, position)
        if match is None:
            return Malformed(
                reason="The tool call's arguments are not <arg_key>...</arg_key><arg_value>...</arg_value>."
            )
        key = match[1].strip()
        if key != ARGUMENT or key in arguments:
            return Malformed(reason=f"Argument {_quoted(key)} is not wanted. {TOOL} takes one, {ARGUMENT}.")
        arguments[key] = match[2]
        position = match.end()
    command = arguments.get(ARGUMENT, "")
    if not command.strip():
        return Malformed(reason=f"The tool call has no {ARGUMENT}.")
    if "\0" in command:
        return Malformed(reason="The command holds a NUL byte.")
    return Run(command=command)


def _quoted(name: str) -> str:
    """Short, one line: what the model wrote goes back to it, never a page of it."""
    flat = " ".join(name.split())
    return repr(flat if len(flat) <= 40 else flat[:40] + "...")
