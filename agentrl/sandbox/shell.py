"""Shell text to simple commands: a tolerant, linear tokenizer. Pure.

It answers one question, "which programs would this line start, with which words?", and nothing about expansion: words
lose their quotes, parameters stay as written, redirections go, here-document bodies are kept apart from the words, and
the commands inside `$(...)`, backticks, `<(...)` and `(...)` are listed like all others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PLAIN = re.compile(r"[^\s'\"\\$`;|&<>()#]+")
_IN_DOUBLE = re.compile(r'[^"\\$`]+')
_MAX_STEPS = 10_000
"""Pieces (words, quotes, separators) of one text: a person or a model writes dozens. Bounds the time, not the length,
so that a long here-document costs nothing."""

_MAX_NESTING = 50

_BLANK = " \t\r\f\v"


class ShellSyntaxError(ValueError):
    """A quote or a parenthesis is never closed, or the text has more pieces than are worth reading."""


@dataclass
class Command:
    """One simple command. stdin: bodies of its here-documents and here-strings, in order."""

    words: list[str] = field(default_factory=list)
    stdin: list[str] = field(default_factory=list)


@dataclass
class _Frame:
    """A nesting level: the whole text, a substitution, or a parenthesis. opener: what it was opened with."""

    opener: str
    command: Command = field(default_factory=Command)
    word: list[str] | None = None
    double: bool = False
    awaits: str = ""  # the redirection whose operand comes next


def split_commands(text: str) -> list[Command]:
    """The simple commands in the order they begin. ShellSyntaxError where the text ends inside a quote or bracket."""
    return _Scanner(text).run()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.stack = [_Frame("")]
        self.found: list[Command] = []
        self.heredocs: list[tuple[Command, str, bool]] = []  # (whose, delimiter, strip tabs), bodies still to come

    @property
    def top(self) -> _Frame:
        return self.stack[-1]

    def run(self) -> list[Command]:
        steps = 0
        while self.at < len(self.text):
            steps += 1
            if steps > _MAX_STEPS or len(self.stack) > _MAX_NESTING:
                raise ShellSyntaxError("too many pieces to read")
            if self.top.double:
                self.in_double()
            else:
                self.in_open()
        if len(self.stack) > 1 or self.top.double:
            raise ShellSyntaxError(f"{self.top.opener or 'a double quote'} is never closed")
        self.end_command()
        return [command for command in self.found if command.words]

    def in_open(self) -> None:
        if plain := _PLAIN.match(self.text, self.at):
            self.add(plain.group())
            self.at = plain.end()
            return
        char = self.text[self.at]
        if char in _BLANK:
            self.end_word()
        elif char == "\n":
            self.end_command()
            self.at += 1
            self.skip_heredocs()
            return
        elif char == "'":
            self.single_quoted()
            return
        elif char == '"':
            self.add("")
            self.top.double = True
        elif char == "#" and self.top.word is None:
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
            return
        elif char in "<>" or self.text.startswith("&>", self.at):
            self.redirection()
            return
        elif char in ";|&":
            self.end_command()
        elif char == "(":
            self.end_command()
            self.stack.append(_Frame("("))
        elif char == ")":
            self.close_paren()
        else:
            self.expansion(char)
            return
        self.at += 1

    def in_double(self) -> None:
        if plain := _IN_DOUBLE.match(self.text, self.at):
            self.add(plain.group())
            self.at = plain.end()
        elif self.text[self.at] == '"':
            self.top.double = False
            self.at += 1
        else:
            self.expansion(self.text[self.at])

    def expansion(self, char: str) -> None:
        """`\\`, `$`, a backtick, or a stray `#`: the same inside double quotes and out."""
        following = self.text[self.at + 1 : self.at + 2]
        if char == "\\":
            if following != "\n":
                self.add(following)
            self.at += 2
        elif char == "$" and following == "(":
            self.add("$")
            self.stack.append(_Frame("$("))
            self.at += 2
        elif char == "`":
            if self.top.opener == "`":
                self.pop()
            else:
                self.add("$")
                self.stack.append(_Frame("`"))
            self.at += 1
        else:
            self.add(char)
            self.at += 1

    def single_quoted(self) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise ShellSyntaxError("a single quote is never closed")
        self.add(self.text[self.at + 1 : end])
        self.at = end + 1

    def redirection(self) -> None:
        frame = self.top
        if frame.word is not None and "".join(frame.word).isdigit():
            frame.word = None  # a file descriptor, not an argument
        self.end_word()
        operator = next(op for op in ("<<<", "<<-", "&>>", "<<", ">>", "<>", ">|", ">&", "<&", "&>", "<", ">")
                        if self.text.startswith(op, self.at))  # fmt: skip
        self.at += len(operator)
        if operator in "<>" and self.text.startswith("(", self.at):
            self.add("$")
            self.stack.append(_Frame("<("))
            self.at += 1
        else:
            frame.awaits = operator

    def skip_heredocs(self) -> None:
        for command, delimiter, strip_tabs in self.heredocs:
            began = self.at
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, start, self.at = self.text[self.at : end], self.at, end + 1
                if (line.lstrip("\t") if strip_tabs else line) == delimiter:
                    break
            else:
                start = len(self.text)
            command.stdin.append(self.text[began:start])
        self.heredocs.clear()

    def close_paren(self) -> None:
        self.end_command()
        if self.top.opener in ("(", "$(", "<("):
            self.pop()

    def pop(self) -> None:
        self.end_command()
        self.stack.pop()

    def add(self, piece: str) -> None:
        frame = self.top
        if frame.word is None:
            frame.word = []
        frame.word.append(piece)

    def end_word(self) -> None:
        frame = self.top
        if frame.word is None:
            return
        word, frame.word = "".join(frame.word), None
        operator, frame.awaits = frame.awaits, ""
        if operator in ("<<", "<<-"):
            self.heredocs.append((frame.command, word, operator == "<<-"))
        elif operator == "<<<":
            frame.command.stdin.append(word)
        elif not operator:
            if not frame.command.words:
                self.found.append(frame.command)
            frame.command.words.append(word)

    def end_command(self) -> None:
        self.end_word()
        self.top.awaits = ""
        self.top.command = Command()
