"""The part of a Dockerfile that needs no image: COPY, WORKDIR, ENV and RUN, read into files and set-up lines.

FROM is noted and not followed. Everything else is refused by line, never skipped: a task whose environment is only half
built would grade wrong without anybody noticing.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from pathlib import Path

from agentrl.errors import TaskError
from agentrl.records import Record

SUPPORTED = "FROM, COPY, WORKDIR, ENV and RUN"


class Environment(Record):
    """files: (path under `environment/`, absolute path), sorted as copied. setup: shell lines, in order."""

    image: str
    workdir: str
    env: dict[str, str]
    files: tuple[tuple[str, str], ...]
    setup: tuple[str, ...]


def read(path: Path) -> Environment:
    """Interpret `path`; COPY sources are relative to its folder. TaskError names file, line and remedy."""
    reader = _Reader(path)
    for number, text in _instructions(path):
        reader.line = number
        word, _, rest = text.partition(" ")
        action = getattr(reader, f"do_{word.lower()}", None)
        if action is None:
            raise reader.error(f"{word.upper()} is not supported", f"Use {SUPPORTED}, or a backend that builds images.")
        action(rest.strip())
    return reader.result()


def _instructions(path: Path) -> list[tuple[int, str]]:
    """Logical lines with the number of their first physical line; comments dropped, continuations joined."""
    found: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        line = raw.strip()
        if line.startswith("#") or not line:
            continue
        start = start if pending else number
        pending += line[:-1].rstrip() + " " if line.endswith("\\") else line
        if not line.endswith("\\"):
            found.append((start, pending))
            pending = ""
    if pending:
        found.append((start, pending))
    return found


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0
        self.image = ""
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.files: dict[str, str] = {}  # destination -> source: a later COPY wins
        self.runs: list[tuple[str, str]] = []  # (working folder, command)

    def error(self, message: str, hint: str) -> TaskError:
        return TaskError(f"{self.path}:{self.line}: {message}", hint=hint)

    def result(self) -> Environment:
        made = ("/", f"mkdir -p {shlex.quote(self.workdir)}")  # the sandbox makes the last one itself
        runs = [run for run in self.runs if run != made]
        setup = [line if where == self.workdir else f"cd {shlex.quote(where)} && {line}" for where, line in runs]
        files = tuple((source, target) for target, source in self.files.items())
        return Environment(image=self.image, workdir=self.workdir, env=self.env, files=files, setup=tuple(setup))

    # --- one method an instruction ---

    def do_from(self, rest: str) -> None:
        if self.image:
            raise self.error("a second FROM (multi-stage build)", "Build the artefact beforehand and COPY it.")
        self.image = rest.split()[0] if rest else ""
        if not self.image or self.image.startswith("-"):
            raise self.error(f"cannot read FROM {rest!r}", "Write FROM image:tag.")

    def do_workdir(self, rest: str) -> None:
        self.workdir = self._absolute(rest)
        self.runs.append(("/", f"mkdir -p {shlex.quote(self.workdir)}"))

    def do_env(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        words = self._words(rest)
        if "=" not in name and value:  # the old form: one name, the rest is its value
            words = [f"{name}={value.strip()}"]
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or not key.replace("_", "a").isalnum():
                raise self.error(f"cannot read ENV {rest!r}", "Write ENV NAME=value.")
            if "$" in value:
                raise self.error(f"ENV {key} uses a variable", "Write the value out.")
            self.env[key] = value

    def do_run(self, rest: str) -> None:
        command = shlex.join(self._json(rest)) if rest.startswith("[") else rest
        if not command or command.startswith(("--", "<<")):
            raise self.error(f"cannot read RUN {rest[:40]!r}", "Write a plain shell command.")
        self.runs.append((self.workdir, command))

    def do_copy(self, rest: str) -> None:
        words = self._json(rest) if rest.startswith("[") else self._words(rest)
        if any(word.startswith("--") or "$" in word for word in words):
            raise self.error("COPY with flags or variables", "Write COPY source... destination.")
        if len(words) < 2:
            raise self.error(f"cannot read COPY {rest!r}", "Write COPY source... destination.")
        *sources, target = words
        into = target.endswith("/") or target in (".", "..") or len(sources) > 1
        for source in sources:
            for match in self._matches(source):
                self._copy(match, self._absolute(target), into=into)

    # --- helpers ---

    def _absolute(self, path: str) -> str:
        if not path or "$" in path:
            raise self.error(f"cannot read the path {path!r}", "Write it out, without variables.")
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def _words(self, text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as err:
            raise self.error(f"{err} in {text!r}", "Close the quotes.") from None

    def _json(self, text: str) -> list[str]:
        try:
            words = json.loads(text)
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise self.error(f"cannot read {text!r}", "Write a JSON list of strings, or the plain form.")
        return words

    def _matches(self, source: str) -> list[Path]:
        context = self.path.parent
        pattern = posixpath.normpath(source.lstrip("/")) if source.strip("/") else "."
        found = sorted(context.glob(pattern)) if pattern != "." else [context]
        if pattern.startswith("..") or not found:
            raise self.error(f"COPY {source}: no such file in {context}", "Name a file below environment/.")
        return found

    def _copy(self, source: Path, target: str, *, into: bool) -> None:
        context = self.path.parent
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_symlink():
                raise self.error(f"COPY of the symlink {file.name}", "Copy the file itself, and RUN ln -s.")
            inner = file.relative_to(source).as_posix() if source.is_dir() else (source.name if into else ".")
            destination = posixpath.normpath(posixpath.join(target, inner))
            if file.is_file():
                self.files[destination] = file.relative_to(context).as_posix()
            elif not any(file.iterdir()):
                self.runs.append(("/", f"mkdir -p {shlex.quote(destination)}"))
