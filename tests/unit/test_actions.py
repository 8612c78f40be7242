"""Parsing replies: every text is an action, and only a well-formed single call runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.actions import Malformed, Run, Submit, parse
from tests.builders import call_text

PIECES = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "shell", "command"]
PIECES += ["<think>", "</think>", "\n", " ", "\0", "ls"]
broken = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5))).map("".join)


@given(text=broken, cut=st.booleans())
def test_parse_never_raises_and_faults_are_short(text: str, cut: bool) -> None:
    action = parse(text, cut=cut)
    if isinstance(action, Malformed):
        assert 0 < len(action.reason) < 200
        assert "\n" not in action.reason
    if isinstance(action, Run):
        assert action.command.strip()
        assert "\0" not in action.command


@given(command=st.text(min_size=1).filter(lambda c: c.strip() and "\0" not in c and "</" not in c and "<tool" not in c))
def test_a_command_arrives_as_it_was_written(command: str) -> None:
    assert parse(call_text(command)) == Run(command=command)
    assert parse(f"<think>hm <tool_call></think>\nI will.\n{call_text(command)}") == Run(command=command)


def test_glm_writes_it_with_or_without_line_breaks() -> None:
    tight = "<tool_call>shell<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
    assert parse(tight) == Run(command="ls")


def test_a_command_may_have_many_lines() -> None:
    script = "cat > a.py <<'E'\nprint('<b>')\nE\npython a.py"
    assert parse(call_text(script)) == Run(command=script)


def test_no_call_is_the_final_answer() -> None:
    assert parse("done\n") == Submit(answer="done")
    assert parse("<think>why</think>done") == Submit(answer="done")
    assert parse("") == Submit(answer="")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call_text("ls") + call_text("ls"), "2 tool calls"),
        (call_text("ls").replace("shell", "python"), "no tool 'python'"),
        (call_text("ls").replace("shell", "x" * 500), "no tool 'xxxx"),
        (call_text("ls").removesuffix("</tool_call>"), "opened and not closed"),
        ("</tool_call>", "closed and not opened"),
        ("<tool_call>shell</tool_call>", "no command"),
        ("<tool_call></tool_call>", "no tool ''"),
        (call_text(" "), "no command"),
        (call_text("a\0b"), "NUL"),
        (call_text("ls").replace("<arg_key>command", "<arg_key>cmd"), "Argument 'cmd' is not wanted"),
        (call_text("a</arg_value><arg_key>command</arg_key><arg_value>b"), "Argument 'command' is not wanted"),
        (call_text("ls").replace("</arg_value>", ""), "arguments are not"),
        (call_text("ls").replace("</arg_value>", "</arg_value>tail"), "arguments are not"),
        ("<think>for ever", "never closed"),
    ],
)
def test_what_cannot_run_says_why(text: str, reason: str) -> None:
    action = parse(text)
    assert isinstance(action, Malformed)
    assert reason in action.reason


def test_a_cut_reply_is_never_acted_on() -> None:
    assert isinstance(parse(call_text("ls"), cut=True), Malformed)
