"""How a command's result is shown to the model. One place, so that warm-start data and live rollouts read the same."""

from __future__ import annotations

from agentrl.records import ExecResult

SYSTEM = "Solve the task with shell commands. Say done when it is solved."


def render(result: ExecResult, limit_chars: int) -> str:
    """Output without its last newlines, cut in the middle at `limit_chars`, then what went wrong in brackets.

    >>> render(ExecResult(exit_code=1, output="no such file\\n"), 100)
    'no such file\\n[exit 1]'
    """
    text = result.output.rstrip("\n")
    if len(text) > limit_chars:
        half = limit_chars // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"
    if result.timed_out:
        note = "[timed out]"
    elif result.oom:
        note = "[out of memory]"
    elif result.exit_code:
        note = f"[exit {result.exit_code}]"
    else:
        return text
    return f"{text}\n{note}" if text else note
