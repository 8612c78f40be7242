"""Puts agentrl onto a machine: wheels that are missing there, and a virtual environment made of them below its home.

    HOME/wheels/       the wheels, exactly those of the last installation
    HOME/venv/         the environment; `installed.json` in it says what it was made of, written last

Needs Python 3.11 there; neither root, nor a network, nor pip or ensurepip.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.hosts import wheels
from agentrl.hosts.wheels import Target
from agentrl.ports import Host, Progress
from agentrl.records import Record

OLDEST = (3, 11)
_ASK_S = 60.0
_PIP_S = 1800.0
_SEND_S = 3600.0
_TARGET = """
import json, platform, sys
libc, version = platform.libc_ver()
print(json.dumps({"python": sys.version_info[:2], "machine": platform.machine(),
                  "glibc": int(version.split(".")[1]) if libc == "glibc" else 0}))
"""
_SUMS = 'mkdir -p "$1" && cd "$1" && for f in *.whl; do [ -e "$f" ] && sha256sum -- "$f"; done; true'
_WORKS = 'test -x "$1/bin/python" && "$1/bin/python" -I -c "import agentrl" && cat "$1/installed.json"'
_MADE = '"$2/bin/python" -I -c "" 2>/dev/null || "$1" -I -m venv --clear --without-pip "$2"'
_ARRIVED = 'cd "$1" && mv -f -- .part/* . && rmdir .part'
_ALONE_BYTES = 32 << 20  # of wheels that are sent by themselves: what has arrived need not be sent again


class Installed(Record):
    """What one machine has now. sent: wheels that were missing. changed: whether anything was done."""

    host: str
    python: str
    version: str
    sent: int
    changed: bool


async def target(host: Host, base: str) -> Target:
    """What interpreter `base` is. UnavailableError where it is not there or too old."""
    if not base:
        raise UnavailableError(f"host {host.name}: no python3 there", hint="install Python 3.11 or newer")
    code, said = await host.run([base, "-I", "-c", _TARGET], timeout_s=_ASK_S)
    try:
        fields = json.loads(said)
        found = Target(python=tuple(fields["python"]), machine=fields["machine"], glibc=fields["glibc"])
    except (ValueError, KeyError, TypeError) as exc:
        raise UnavailableError(f"host {host.name}: {base} does not run (exit {code}): {said.strip()[-300:]}") from exc
    if found.python < OLDEST:
        version = ".".join(map(str, found.python))
        raise UnavailableError(
            f"host {host.name}: {base} is Python {version}; agentrl needs 3.11 or newer",
            hint="put a newer one on its PATH (python3.11, ...), or name one that has agentrl by hosts.python",
        )
    return found


async def install(
    host: Host, base: str, given: Sequence[Path], extras: Sequence[str], progress: Progress, *, index: bool = False
) -> Installed:
    """base: the interpreter of the environment. given: wheels here, agentrl's among them; with `index` the others come
    from the machine's own package index, else all are there and no network is needed."""
    own = wheels.of("agentrl", given)
    if own is None:
        raise UserError("no wheel of agentrl is among those given", hint="`pip wheel --no-deps -w DIR .` makes it")
    return await _Installation(host, base, sorted(extras), progress).run(
        {each.name: each for each in given}, own, index
    )


class _Installation:
    def __init__(self, host: Host, base: str, extras: list[str], progress: Progress) -> None:
        self._host, self._base, self._extras = host, base, extras
        self._progress = progress
        self._wheels = f"{host.home}/wheels"
        self._venv = f"{host.home}/venv"

    async def run(self, given: Mapping[str, Path], own: Path, index: bool) -> Installed:
        have = await asyncio.to_thread(lambda: {name: wheels.digest(path) for name, path in given.items()})
        recipe = json.dumps({"wheels": have, "extras": self._extras, "base": self._base}, sort_keys=True)
        python = f"{self._venv}/bin/python"
        version = own.name.split("-")[1]
        done = Installed(host=self._host.name, python=python, version=version, sent=0, changed=False)
        code, said = await self._host.run(["sh", "-c", _WORKS, "sh", self._venv], timeout_s=_ASK_S)
        if code == 0 and said.strip() == recipe:
            return done
        sent = await self._send(given, have)
        pip = await self._pip(given)
        self._tell("virtual environment")
        await self._must(["sh", "-c", _MADE, "sh", self._base, self._venv])
        await self._must(["rm", "-f", "--", f"{self._venv}/installed.json"])
        self._tell("installing")
        source = [*([] if index else ["--no-index"]), "--find-links", self._wheels]
        wheel = f"{self._wheels}/{own.name}"
        install = [python, pip, "--disable-pip-version-check", "install", "--no-input", "-q"]
        await self._must([*install, *source, "--no-deps", "--force-reinstall", wheel])
        await self._must([*install, *source, f"{wheel}[{','.join(self._extras)}]" if self._extras else wheel])
        await self._host.write(f"{self._venv}/installed.json", recipe.encode(), mode=0o644)
        self._tell("done", 1.0)
        return Installed(host=done.host, python=python, version=version, sent=sent, changed=True)

    async def _send(self, given: Mapping[str, Path], have: Mapping[str, str]) -> int:
        """Makes the wheels there those of `have`; how many were missing or different."""
        there = await self._there()
        missing = [path for name, path in given.items() if there.get(name) != have[name]]
        batches = await asyncio.to_thread(_batches, missing)
        for number, batch in enumerate(batches):
            what = batch[0].name if len(batch) == 1 else f"{len(batch)} wheels"
            self._tell(f"sending {what}", number / len(batches))
            with tempfile.TemporaryDirectory(prefix="agentrl-") as together:
                for path in batch:
                    os.symlink(path, f"{together}/{path.name}")  # noqa: PTH211 (a name for what is sent)
                await self._host.send(together, f"{self._wheels}/.part", deadline_s=_SEND_S)
            await self._must(["sh", "-c", _ARRIVED, "sh", self._wheels])
        if strays := sorted(set(there) - set(have)):
            await self._must(["rm", "-f", "--", *(f"{self._wheels}/{name}" for name in strays)])
        if missing and await self._there() != have:
            raise DataError(f"host {self._host.name}: {self._wheels}: the wheels are not those that were sent")
        return len(missing)

    async def _there(self) -> dict[str, str]:
        said = await self._must(["sh", "-c", _SUMS, "sh", self._wheels])
        sums = (line.split(maxsplit=1) for line in said.splitlines())
        return {name.strip(): digest for digest, name in sums}

    async def _pip(self, given: Mapping[str, Path]) -> str:
        """The path of a pip that runs out of its own wheel, so that none need be there."""
        if wheel := wheels.of("pip", list(given.values())):
            return f"{self._wheels}/{wheel.name}/pip"
        bundled = await asyncio.to_thread(wheels.bundled_pip)
        there = f"{self._host.home}/pip/{bundled.name}"
        await self._host.send(str(bundled), there, deadline_s=_SEND_S)
        return f"{there}/pip"

    async def _must(self, argv: Sequence[str]) -> str:
        code, said = await self._host.run(argv, timeout_s=_PIP_S)
        if code:
            end = "\n".join(said.strip().splitlines()[-8:])
            raise UnavailableError(f"host {self._host.name}: installation failed:\n{end}", hint="mend what it names")
        return said

    def _tell(self, what: str, share: float | None = None) -> None:
        self._progress(self._host.name, what, share)


def _batches(paths: Sequence[Path]) -> list[list[Path]]:
    large = [path for path in paths if path.stat().st_size > _ALONE_BYTES]
    small = [path for path in paths if path not in large]
    return [*([small] if small else []), *([path] for path in large)]
