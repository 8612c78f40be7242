"""Which lane a command belongs to, decided before it starts. Pure, deterministic, with the reason in words.

A line is heavy when any simple command in it is: it installs packages, builds, downloads, or runs tests in parallel.
Leading assignments, shell keywords and wrappers (`sudo`, `env`, `timeout`, ...) are taken off; `sh -c`, `eval`,
here-documents fed to a shell and `python -m` are looked into. What is only mentioned (an argument of `echo` or `grep`,
a path) never counts. The command itself is never changed: only where it runs is.
"""

from __future__ import annotations

import re

from agentrl.records import Lane, Record
from agentrl.sandbox import families
from agentrl.sandbox.shell import Command, ShellSyntaxError, split_commands

MAX_CHARS = 65_536
"""Only so much of a command is looked at: the decision must stay cheap whatever the model writes."""

_DEPTH = 3
_KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "time", "coproc"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[^\]]*\])?\+?=")
_SHELL = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "fish"})
_SHELL_C = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*$")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*$")
_MENTIONS = re.compile(
    r"(?<![\w./-])(?:(?:apt|apt-get|aptitude|dnf|yum|apk|pip[0-9.]*|uv|conda|mamba|npm|pnpm|yarn|cargo|go|gem|bundle|"
    r"poetry|pipx|docker)\s+(?:-\S+\s+)*(?:pip\s+)?(?:install|add|upgrade|update|build|sync|ci|create)|"
    r"git\s+clone|cmake\s+--build|make\s+-j\w*|(?<!\w)ninja)(?![\w-])"
)


class _Wrapper(Record):
    """valued: options followed by a value. positional: words before the wrapped command."""

    valued: frozenset[str] = frozenset()
    positional: int = 0


_WRAPPERS: dict[str, _Wrapper] = {
    name: _Wrapper(valued=frozenset(valued.split()), positional=positional)
    for name, valued, positional in (
        ("sudo", "-u -g -h -p -C -D -R -T -U -r -t --user --group --chdir --prompt", 0),
        ("doas", "-u -C", 0),
        ("env", "-u -C --unset --chdir", 0),
        ("nice", "-n --adjustment", 0),
        ("ionice", "-c -n -p --class --classdata", 0),
        ("time", "-f -o --format --output", 0),
        ("timeout", "-k -s --kill-after --signal", 1),
        ("nohup", "", 0),
        ("stdbuf", "-i -o -e --input --output --error", 0),
        ("xargs", "-I -n -P -d -L -s -a -E --max-args --max-procs --delimiter --arg-file --replace", 0),
        ("setsid", "", 0),
        ("exec", "-a", 0),
        ("command", "", 0),
        ("builtin", "", 0),
        ("taskset", "", 1),
        ("flock", "-w -E --timeout --wait --conflict-exit-code", 1),
        ("numactl", "-C -m -N -l --cpunodebind --membind --physcpubind", 0),
        ("chroot", "", 1),
        ("fakeroot", "", 0),
        ("eatmydata", "", 0),
        ("chronic", "", 0),
        ("unbuffer", "", 0),
        ("busybox", "", 0),
        ("strace", "-o -e -p -s", 0),
        ("proxychains4", "-f", 0),
    )
}


class Decision(Record):
    """lane is `command` or `package`; reason names what decided."""

    lane: Lane
    reason: str


ORDINARY = Decision(lane=Lane.COMMAND, reason="nothing package-heavy in it")


def classify(command: str) -> Decision:
    """The lane for one command line. Never raises; time grows linearly and stops growing at MAX_CHARS."""
    reason = _heavy(command[:MAX_CHARS], _DEPTH)
    return Decision(lane=Lane.PACKAGE, reason=reason) if reason else ORDINARY


def _heavy(text: str, depth: int) -> str:
    try:
        commands = split_commands(text)
    except ShellSyntaxError as error:
        mention = _MENTIONS.search(text)
        return f"{mention.group()} (found by search: {error})" if mention else ""
    return next(filter(None, (_heavy_command(command, depth) for command in commands)), "")


def _heavy_command(command: Command, depth: int) -> str:
    words = command.words
    at = 0
    while at < len(words):
        word = words[at]
        if word in _KEYWORDS or _ASSIGNMENT.match(word):
            at += 1
            continue
        name = word.rsplit("/", 1)[-1]
        if name not in _WRAPPERS:
            break
        if reason := _parallel_xargs(name, words[at + 1 :]):
            return reason
        at, inner = _unwrap(words, at, name)
        if inner:
            return _heavy(inner, depth - 1) if depth > 0 else ""
    if at >= len(words):
        return ""
    name, args = words[at].rsplit("/", 1)[-1], words[at + 1 :]
    if name in _SHELL:
        return _shell_script(args, command.stdin, depth)
    if name == "eval":
        return _heavy(" ".join(args), depth - 1) if depth > 0 else ""
    if name == "su" and "-c" in args[:-1]:
        return _heavy(args[args.index("-c") + 1], depth - 1) if depth > 0 else ""
    if _PYTHON.match(name):
        return _python(args)
    return families.heavy(name, args)


def _unwrap(words: list[str], at: int, name: str) -> tuple[int, str]:
    """(index of the wrapped command, "") or (0, the shell string that the wrapper runs)."""
    wrapper = _WRAPPERS[name]
    positional = wrapper.positional
    at += 1
    while at < len(words):
        word = words[at]
        if name == "command" and word in ("-v", "-V"):
            return len(words), ""
        if name == "taskset" and word in ("-p", "-cp", "-pc"):
            return len(words), ""
        if name == "flock" and word in ("-c", "--command") and at + 1 < len(words):
            return 0, words[at + 1]
        if name in ("sudo", "env", "doas") and _ASSIGNMENT.match(word):
            at += 1
        elif word.startswith("-") and len(word) > 1:
            at += 2 if word in wrapper.valued else 1
        elif positional:
            positional -= 1
            at += 1
        else:
            break
    return at, ""


def _parallel_xargs(name: str, args: list[str]) -> str:
    if name != "xargs":
        return ""
    width = families.option_value(args, "-P", "--max-procs")
    return "" if width in (None, "1") else f"xargs -P {width}"


def _shell_script(args: list[str], stdin: list[str], depth: int) -> str:
    if depth <= 0:
        return ""
    for i, word in enumerate(args):
        if _SHELL_C.match(word):
            script = next((arg for arg in args[i + 1 :] if not arg.startswith("-")), "")
            return _heavy(script, depth - 1)
        if not word.startswith(("-", "+")):
            return families.heavy(word.rsplit("/", 1)[-1], args[i + 1 :])  # `sh configure`, `bash gradlew build`
    return next(filter(None, (_heavy(body, depth - 1) for body in stdin)), "")


def _python(args: list[str]) -> str:
    skip = False
    for i, word in enumerate(args):
        if skip:
            skip = False
        elif word == "-m":
            module, rest = (args[i + 1 : i + 2] or [""])[0], args[i + 2 :]
            return families.heavy_module(module, rest)
        elif word in ("-W", "-X"):
            skip = True
        elif word.startswith("-c"):
            return ""
        elif not word.startswith("-"):
            return families.heavy(word.rsplit("/", 1)[-1], args[i + 1 :]) if word.endswith("setup.py") else ""
    return ""
