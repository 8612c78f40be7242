"""agentrl and all it needs as wheels for another machine's interpreter: built and downloaded here, and kept."""

from __future__ import annotations

import ensurepip
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import agentrl
from agentrl.errors import UnavailableError, UserError
from agentrl.records import Record

_BUILD_S = 300.0
_DOWNLOAD_S = 3600.0
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # by glibc 2.N


class Target(Record):
    """An interpreter there. python: (major, minor). machine: as uname has it. glibc: N of 2.N; 0: another libc."""

    python: tuple[int, int]
    machine: str
    glibc: int

    @property
    def platforms(self) -> list[str]:
        """The platform tags that it takes, best first."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, 4, -1)]
        old = [f"{name}_{self.machine}" for minor, name in _OLD_NAMES.items() if minor <= self.glibc]
        return [*tags, *old, f"linux_{self.machine}"]


def own(cache: Path) -> Path:
    """agentrl's own wheel, built from the source that runs now; anew only where that has changed."""
    package = Path(agentrl.__file__).parent
    source = package.parent
    if not (source / "pyproject.toml").is_file():
        raise UserError(
            f"{package}: agentrl runs from an installed package, of which no wheel can be built",
            hint="give a folder with its wheel and all others: --wheels DIR",
        )
    files = [source / "pyproject.toml", *sorted(each for each in package.rglob("*") if _is_source(each))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(source)}\0".encode() + file.read_bytes() + b"\0")
    folder = cache / f"own-{digest.hexdigest()[:16]}"
    if not (found := list(folder.glob("agentrl-*.whl"))):
        fresh = _fresh(folder)
        try:
            _copy(source, files, fresh / "source")
            _pip(["wheel", "--no-deps", *_isolation(), "-w", str(fresh), str(fresh / "source")], _BUILD_S)
            shutil.rmtree(fresh / "source")
            _keep(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        found = list(folder.glob("agentrl-*.whl"))
    return found[0]


def everything(cache: Path, wheel: Path, extras: Sequence[str], target: Target) -> list[Path]:
    """`wheel` and all that it needs with `extras` on `target`; downloaded anew only where those needs have changed."""
    if not target.glibc:
        raise UserError("there are no wheels for its libc", hint="--there: let it install from its own package index")
    said = repr((_needs(wheel), sorted(extras), target)).encode()
    folder = cache / f"needs-{hashlib.sha256(said).hexdigest()[:16]}"
    if not folder.is_dir():
        version = "".join(map(str, target.python))
        fresh = _fresh(folder)
        try:
            _pip(
                [
                    *("download", "-d", str(fresh), "--only-binary=:all:"),
                    *("--python-version", ".".join(map(str, target.python)), "--implementation", "cp"),
                    *(part for abi in (f"cp{version}", "abi3", "none") for part in ("--abi", abi)),
                    *(part for platform in target.platforms for part in ("--platform", platform)),
                    *("pip", f"{wheel}[{','.join(extras)}]" if extras else str(wheel)),
                ],
                _DOWNLOAD_S,
            )
            (fresh / wheel.name).unlink()
            _keep(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return [wheel, *in_folder(folder)]


def in_folder(folder: Path) -> list[Path]:
    return sorted(folder.absolute().glob("*.whl"))


def digest(wheel: Path) -> str:
    """SHA-256."""
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bundled_pip() -> Path:
    """The wheel of pip that came with the Python that runs here."""
    folders = [Path(ensurepip.__file__).parent / "_bundled", Path("/usr/share/python-wheels")]
    for folder in folders:
        if found := sorted(folder.glob("pip-*.whl")):
            return found[-1]
    raise UserError("no wheel of pip among the wheels, nor here", hint="`pip download --no-deps -d DIR pip` gets it")


def of(project: str, wheels: Sequence[Path]) -> Path | None:
    """The wheel of that project; the last by name where there are several."""
    return max((each for each in wheels if each.name.split("-")[0].lower() == project), default=None)


def _needs(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        lines = opened.read(name).decode().splitlines()
    return sorted(line for line in lines if line.startswith(("Requires-Dist:", "Provides-Extra:")))


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _copy(source: Path, files: Sequence[Path], into: Path) -> None:
    """Only what belongs in: a build leaves things in its source folder."""
    for file in (*files, *source.glob("README*"), *source.glob("LICENSE*")):
        target = into / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)


def _isolation() -> list[str]:
    """Without a network pip cannot fetch the build's own needs; where they are here already it need not."""
    have = subprocess.run(
        [sys.executable, "-c", "import setuptools; raise SystemExit(int(setuptools.__version__.split('.')[0]) < 75)"],
        check=False,
        capture_output=True,
        timeout=60,
    )
    return ["--no-build-isolation"] if have.returncode == 0 else []


def _pip(argv: Sequence[str], timeout_s: float) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *argv]
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as exc:
        raise UnavailableError(f"pip {argv[0]} here was not done within {timeout_s:g} s") from exc
    if done.returncode:
        end = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise UnavailableError(f"pip {argv[0]} failed here:\n{end}", hint="mend it, or give the wheels: --wheels DIR")


def _fresh(folder: Path) -> Path:
    fresh = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    return fresh


def _keep(fresh: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
