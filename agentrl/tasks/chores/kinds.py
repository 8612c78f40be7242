"""Twenty-one families of small shell tasks. A kind is a pure function of a random generator.

Each chore says how its workspace looks, what to do, one way to do it, and how to tell that it was done. Goals are
shell conditions that fail at the start; keeps are conditions that hold at the start and must still hold at the end,
so that an agent that does nothing, or breaks everything, scores 0.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Callable
from random import Random

from agentrl.records import File, Record
from agentrl.tasks.chores.words import NAMES


class Chore(Record, kw_only=True):
    """One problem. Paths are relative to the working folder. The script is run command by command, in fresh shells."""

    instruction: str
    files: dict[str, File] = {}
    script: tuple[str, ...]
    goals: tuple[str, ...]
    keeps: tuple[str, ...] = ()


Kind = Callable[[Random], Chore]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


# --- conditions and file contents -------------------------------------------------------------------------------------


def holds(path: str, text: str) -> str:
    return f"holds {path} {shlex.quote(text)}"


def gone(path: str) -> str:
    return f"gone {path}"


def lines(words: list[str]) -> File:
    return File(data=("\n".join(words) + "\n").encode())


def names(rng: Random, count: int) -> list[str]:
    return rng.sample(NAMES, count)


# --- one command does it ----------------------------------------------------------------------------------------------


@kind
def write(rng: Random) -> Chore:
    name, word = names(rng, 2)
    return Chore(
        instruction=f"Write the word {word} to the file {name}.txt.",
        script=(f"echo {word} > {name}.txt",),
        goals=(holds(f"{name}.txt", word),),
    )


@kind
def append(rng: Random) -> Chore:
    name, word, *old = names(rng, 4)
    return Chore(
        instruction=f"Append the word {word} to the file {name}.txt.",
        files={f"{name}.txt": lines(old)},
        script=(f"echo {word} >> {name}.txt",),
        goals=(holds(f"{name}.txt", "\n".join([*old, word])),),
    )


@kind
def rename(rng: Random) -> Chore:
    old, new, word = names(rng, 3)
    return Chore(
        instruction=f"Rename {old}.txt to {new}.txt.",
        files={f"{old}.txt": lines([word])},
        script=(f"mv {old}.txt {new}.txt",),
        goals=(f"{holds(f'{new}.txt', word)} && {gone(f'{old}.txt')}",),
    )


@kind
def copy(rng: Random) -> Chore:
    old, new, word = names(rng, 3)
    return Chore(
        instruction=f"Copy {old}.txt to {new}.txt.",
        files={f"{old}.txt": lines([word])},
        script=(f"cp {old}.txt {new}.txt",),
        goals=(holds(f"{new}.txt", word),),
        keeps=(holds(f"{old}.txt", word),),
    )


@kind
def delete(rng: Random) -> Chore:
    first, second, kept, word = names(rng, 4)
    return Chore(
        instruction="Delete all files that end in .log.",
        files={f"{first}.log": lines([word]), f"{second}.log": lines([word]), f"{kept}.txt": lines([word])},
        script=("rm *.log",),
        goals=(gone(f"{first}.log"), gone(f"{second}.log")),
        keeps=(holds(f"{kept}.txt", word),),
    )


@kind
def count(rng: Random) -> Chore:
    source, target = names(rng, 2)
    rows = names(rng, rng.randint(2, 5))
    return Chore(
        instruction=f"Count the lines of {source}.txt into {target}.txt.",
        files={f"{source}.txt": lines(rows)},
        script=(f"wc -l < {source}.txt > {target}.txt",),
        goals=(f'[ -f {target}.txt ] && [ "$(tr -d " " < {target}.txt)" = {len(rows)} ]',),
        keeps=(holds(f"{source}.txt", "\n".join(rows)),),
    )


@kind
def sort(rng: Random) -> Chore:
    source, target = names(rng, 2)
    rows = _shuffled(rng, 4)
    return Chore(
        instruction=f"Sort the lines of {source}.txt into {target}.txt.",
        files={f"{source}.txt": lines(rows)},
        script=(f"sort {source}.txt > {target}.txt",),
        goals=(holds(f"{target}.txt", "\n".join(sorted(rows))),),
        keeps=(holds(f"{source}.txt", "\n".join(rows)),),
    )


@kind
def filter(rng: Random) -> Chore:  # noqa: A001
    source, target, word, *rest = names(rng, 6)
    rows = [f"{rest[0]} {word}", rest[1], f"{word} {rest[2]}"]
    rng.shuffle(rows)
    found = [row for row in rows if word in row.split()]
    return Chore(
        instruction=f"Put the lines of {source}.txt with {word} into {target}.txt.",
        files={f"{source}.txt": lines(rows)},
        script=(f"grep {word} {source}.txt > {target}.txt",),
        goals=(holds(f"{target}.txt", "\n".join(found)),),
        keeps=(holds(f"{source}.txt", "\n".join(rows)),),
    )


@kind
def replace(rng: Random) -> Chore:
    name, old, new, other = names(rng, 4)
    rows = [other, old, f"{old} {other}"]
    return Chore(
        instruction=f"Replace {old} by {new} in {name}.txt.",
        files={f"{name}.txt": lines(rows)},
        script=(f"sed -i s/{old}/{new}/ {name}.txt",),
        goals=(holds(f"{name}.txt", "\n".join(row.replace(old, new) for row in rows)),),
    )


@kind
def join(rng: Random) -> Chore:
    first, second, target, *words = names(rng, 5)
    return Chore(
        instruction=f"Join {first}.txt and {second}.txt into {target}.txt.",
        files={f"{first}.txt": lines(words[:1]), f"{second}.txt": lines(words[1:])},
        script=(f"cat {first}.txt {second}.txt > {target}.txt",),
        goals=(holds(f"{target}.txt", "\n".join(words)),),
        keeps=(holds(f"{first}.txt", words[0]), holds(f"{second}.txt", words[1])),
    )


@kind
def head(rng: Random) -> Chore:
    source, target = names(rng, 2)
    rows, wanted = names(rng, 4), rng.randint(1, 3)
    return Chore(
        instruction=f"Put the first {wanted} lines of {source}.txt into {target}.txt.",
        files={f"{source}.txt": lines(rows)},
        script=(f"head -n {wanted} {source}.txt > {target}.txt",),
        goals=(holds(f"{target}.txt", "\n".join(rows[:wanted])),),
        keeps=(holds(f"{source}.txt", "\n".join(rows)),),
    )


@kind
def upper(rng: Random) -> Chore:
    source, target, *rows = names(rng, 4)
    return Chore(
        instruction=f"Put {source}.txt in upper case into {target}.txt.",
        files={f"{source}.txt": lines(rows)},
        script=(f"tr a-z A-Z < {source}.txt > {target}.txt",),
        goals=(holds(f"{target}.txt", "\n".join(rows).upper()),),
        keeps=(holds(f"{source}.txt", "\n".join(rows)),),
    )


@kind
def permit(rng: Random) -> Chore:
    name, other, word = names(rng, 3)
    body = File(data=f"echo {word}\n".encode())
    return Chore(
        instruction=f"Make {name}.sh executable.",
        files={f"{name}.sh": body, f"{other}.sh": body},
        script=(f"chmod +x {name}.sh",),
        goals=(f"[ -x {name}.sh ]",),
        keeps=(f"[ ! -x {other}.sh ]", holds(f"{name}.sh", f"echo {word}")),
    )


@kind
def link(rng: Random) -> Chore:
    target, name, word = names(rng, 3)
    return Chore(
        instruction=f"Make a link {name}.txt that points to {target}.txt.",
        files={f"{target}.txt": lines([word])},
        script=(f"ln -s {target}.txt {name}.txt",),
        goals=(f"[ -L {name}.txt ] && {holds(f'{name}.txt', word)}",),
        keeps=(f"[ ! -L {target}.txt ]",),
    )


@kind
def archive(rng: Random) -> Chore:
    folder, first, second, word = names(rng, 4)
    return Chore(
        instruction=f"Pack the folder {folder} into {folder}.tar.",
        files={f"{folder}/{first}.txt": lines([word]), f"{folder}/{second}.txt": lines([word])},
        script=(f"tar -cf {folder}.tar {folder}",),
        goals=(
            f"[ -f {folder}.tar ] && tar -tf {folder}.tar {folder}/{first}.txt {folder}/{second}.txt >/dev/null 2>&1",
        ),
        keeps=(holds(f"{folder}/{first}.txt", word),),
    )


@kind
def extract(rng: Random) -> Chore:
    packed, inner, word = names(rng, 3)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        entry = tarfile.TarInfo(f"{inner}.txt")
        entry.size = len(word) + 1
        tar.addfile(entry, io.BytesIO(f"{word}\n".encode()))
    return Chore(
        instruction=f"Unpack the archive {packed}.tar.",
        files={f"{packed}.tar": File(data=data.getvalue())},
        script=(f"tar -xf {packed}.tar",),
        goals=(holds(f"{inner}.txt", word),),
    )


# --- several commands, or a look first --------------------------------------------------------------------------------


@kind
def make(rng: Random) -> Chore:
    folder, name = names(rng, 2)
    return Chore(
        instruction=f"Make a folder {folder} with an empty file {name}.txt in it.",
        script=(f"mkdir {folder}", f"touch {folder}/{name}.txt"),
        goals=(f"[ -d {folder} ]", f"[ -f {folder}/{name}.txt ] && [ ! -s {folder}/{name}.txt ]"),
    )


@kind
def note(rng: Random) -> Chore:
    """The instruction is in a file: nobody can act before reading it."""
    name, old, new, word = names(rng, 4)
    if rng.random() < 0.5:
        order, command = f"Rename {old}.txt to {new}.txt.", f"mv {old}.txt {new}.txt"
        goal = f"{holds(f'{new}.txt', word)} && {gone(f'{old}.txt')}"
    else:
        order, command = f"Copy {old}.txt to {new}.txt.", f"cp {old}.txt {new}.txt"
        goal = f"{holds(f'{new}.txt', word)} && {holds(f'{old}.txt', word)}"
    return Chore(
        instruction=f"Do what {name}.txt says.",
        files={f"{name}.txt": lines([order]), f"{old}.txt": lines([word])},
        script=(f"cat {name}.txt", command),
        goals=(goal,),
        keeps=(holds(f"{name}.txt", order),),
    )


@kind
def find(rng: Random) -> Chore:
    word, *rest = names(rng, 7)
    files = dict(zip((f"{n}.txt" for n in rest[:3]), rest[3:], strict=True))
    wanted = rng.choice(sorted(files))
    files[wanted] = word
    return Chore(
        instruction=f"Delete the file that contains {word}.",
        files={path: lines([text]) for path, text in files.items()},
        script=(f"grep -l {word} *", f"rm {wanted}"),
        goals=(gone(wanted),),
        keeps=tuple(holds(path, text) for path, text in sorted(files.items()) if path != wanted),
    )


@kind
def largest(rng: Random) -> Chore:
    paths = [f"{n}.txt" for n in names(rng, 3)]
    big = rng.choice(paths)
    texts = {path: names(rng, 9 if path == big else rng.randint(1, 2)) for path in paths}
    return Chore(
        instruction="Delete the largest file.",
        files={path: lines(rows) for path, rows in texts.items()},
        script=("ls -S", f"rm {big}"),
        goals=(gone(big),),
        keeps=tuple(f"[ -f {path} ]" for path in paths if path != big),
    )


@kind
def lookup(rng: Random) -> Chore:
    source, *rows = names(rng, 5)
    row = rng.randint(1, 4)
    word = rows[row - 1]
    return Chore(
        instruction=f"Make a folder named by line {row} of {source}.txt.",
        files={f"{source}.txt": lines(rows)},
        script=(f"sed -n {row}p {source}.txt", f"mkdir {word}"),
        goals=(f"[ -d {word} ]",),
        keeps=tuple(f"[ ! -d {other} ]" for other in rows if other != word),
    )


def _shuffled(rng: Random, size: int) -> list[str]:
    """Words in an order that is not sorted, so that doing nothing is not the answer."""
    rows = names(rng, size)
    while rows == sorted(rows):
        rng.shuffle(rows)
    return rows
