"""The table of heavy programs: package managers, builders, downloaders, parallel test runners. Pure.

`heavy(name, args)` gives the reason, or an empty string. A new tool is one line in `_SUBCOMMANDS` or one small rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Rule = Callable[[str, Sequence[str]], str]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SUBCOMMANDS: dict[str, tuple[str, str]] = {
    # names: (heavy sub-commands, options followed by a value before the sub-command)
    "apt apt-get aptitude": ("install reinstall upgrade dist-upgrade full-upgrade build-dep update", "-o -c -t"),
    "dnf yum zypper microdnf": ("install upgrade update groupinstall builddep makecache refresh in up dup", "-c"),
    "apk": ("add upgrade update fix", "--root -p -X"),
    "brew port snap flatpak": ("install upgrade update reinstall", ""),
    "pip": ("install download wheel", "--cache-dir --proxy --timeout --log"),
    "poetry": ("install add update lock build sync", "-C --directory"),
    "pipenv": ("install update sync lock upgrade", ""),
    "pdm": ("install add update sync lock build", ""),
    "pipx": ("install run upgrade upgrade-all inject reinstall", ""),
    "hatch": ("env build", ""),
    "conda mamba micromamba": ("install create update upgrade env", "-n -p --name --prefix"),
    "npm pnpm yarn bun": ("i install ci add update upgrade up rebuild build dlx create", "-C --prefix --cwd --filter"),
    "node-gyp": ("rebuild build configure install", ""),
    "vite next nuxt astro": ("build", ""),
    "cargo": ("build b install test t bench check c fetch run r clippy doc update vendor", "--color --config -C"),
    "rustup": ("install update toolchain component target", ""),
    "go": ("build install get generate", "-C"),
    "dotnet": ("restore build test publish pack run", ""),
    "gem": ("install update", ""),
    "bundle bundler": ("install update package", ""),
    "composer": ("install update require create-project", "-d --working-dir"),
    "cabal stack": ("build install test update bench setup init", ""),
    "opam": ("install init update upgrade switch", ""),
    "bazel bazelisk": ("build test run fetch sync coverage", ""),
    "meson": ("compile install test dist", "-C"),
    "hf huggingface-cli": ("download", ""),
    "dvc": ("pull fetch repro", ""),
    "docker podman nerdctl": ("build pull buildx compose", "-H --host -c --context -l"),
    "docker-compose": ("up build pull", "-f --file -p"),
    "setup.py": ("install develop build build_ext build_py bdist bdist_wheel bdist_egg sdist test", ""),
}

_ALWAYS = _words(
    "tox nox virtualenv ensurepip easy_install easy_install-3 uvx ninja samu scons configure autoreconf autogen.sh "
    "webpack mvn mvnw gradle gradlew sbt ant initdb mysql_install_db aria2c unittest-parallel pigz pbzip2 7z 7za 7zr "
    "debootstrap buildah kaniko waf"
)
_HARMLESS = _words("clean distclean mrproper help -l --list list -n --dry-run --just-print --listenvs -v -V")
_INFORMATION = frozenset({"--help", "--version", "-h"})
_LOCAL = re.compile(r"(https?://)?(localhost|127\.|\[::1\]|0\.0\.0\.0)")
_REMOTE_REPO = re.compile(r"(https?|ssh|git|ftp)://|[\w.-]+@[\w.-]+:|\$")
_SOURCE = re.compile(r".+\.(c|cc|cpp|cxx|C|m|mm|f|f90)$")
_MANY_SOURCES = 8
_PIP = re.compile(r"pip[0-9.]*$")
_COMPILER = re.compile(r"([\w]+-)*(gcc|g\+\+|cc|c\+\+|clang|clang\+\+)(-[0-9.]+)?$")


def heavy(name: str, args: Sequence[str]) -> str:
    """Why `name args...` is package-heavy, or an empty string. `name` is a base name."""
    if _PIP.match(name):
        name = "pip"
    if any(arg in _INFORMATION for arg in args[:4]):
        return ""
    if name in _RULES:
        return _RULES[name](name, args)
    if name in _TABLE:
        subcommands, valued = _TABLE[name]
        word = subcommand(args, valued)
        return f"{name} {word}" if word in subcommands else ""
    if name in _ALWAYS:
        return "" if args and all(arg in _HARMLESS for arg in args) else name
    return _compiler(name, args) if _COMPILER.match(name) else ""


def heavy_module(module: str, args: Sequence[str]) -> str:
    """The same for `python -m module args...`."""
    if module == "build":
        return "python -m build"
    if module == "venv":
        return "" if "--without-pip" in args else "python -m venv (installs pip)"
    return heavy(module, args)


def subcommand(args: Sequence[str], valued: frozenset[str] = frozenset()) -> str:
    """The first word that is neither an option, nor an option's value, nor a `+toolchain`."""
    skip = False
    for arg in args:
        if skip:
            skip = False
        elif arg in valued:
            skip = True
        elif arg and arg[0] not in "-+":
            return arg
    return ""


def option_value(args: Sequence[str], short: str, *long: str) -> str | None:
    """`-n 4`, `-n4`, `--name 4`, `--name=4`: "4". A flag without a value gives "". None where it is absent."""
    for i, arg in enumerate(args):
        name, eq, value = arg.partition("=")
        if name in long and eq:
            return value
        if arg == short or arg in long:
            return args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("-") else ""
        if len(short) == 2 and arg.startswith(short):
            return arg[2:].removeprefix("=")
    return None


def _wide(width: str | None) -> bool:
    return width is not None and width not in ("0", "1", "no")


def _make(name: str, args: Sequence[str]) -> str:
    jobs = option_value(args, "-j", "--jobs")
    if jobs is not None and jobs != "1":
        return f"{name} -j"
    if any(arg in ("-n", "--dry-run", "--just-print", "-q") for arg in args):
        return ""
    targets = [arg for arg in _positional(args, "-C -f -I -o -W -j -l --directory --file") if "=" not in arg]
    return "" if targets and all(target in _HARMLESS for target in targets) else name


def _positional(args: Sequence[str], valued: str) -> list[str]:
    options, found, skip = _words(valued), [], False
    for arg in args:
        if skip:
            skip = False
        elif arg in options:
            skip = True
        elif not arg.startswith("-"):
            found.append(arg)
    return found


def _pytest(name: str, args: Sequence[str]) -> str:
    workers = option_value(args, "-n", "--numprocesses")
    if _wide(workers):
        return f"{name} -n {workers}"
    return f"{name} --dist" if _wide(option_value(args, "--dist", "--dist")) else ""


def _go(name: str, args: Sequence[str]) -> str:
    word = subcommand(args, frozenset({"-C"}))
    if word == "test":
        return "go test ./..." if any(arg.endswith("...") for arg in args) else ""
    if word == "mod":
        return f"go mod {args[-1]}" if args[-1] in ("download", "tidy", "vendor") else ""
    return f"go {word}" if word in _TABLE["go"][0] else ""


def _node(name: str, args: Sequence[str]) -> str:
    subcommands, valued = _TABLE[name]
    word = subcommand(args, valued)
    if not word and name == "yarn":
        return "yarn (installs)"
    if word in ("run", "run-script"):
        script = subcommand(args[args.index(word) + 1 :])
        return f"{name} run {script}" if script.startswith("build") else ""
    return f"{name} {word}" if word in subcommands else ""


def _npx(name: str, args: Sequence[str]) -> str:
    package = subcommand(args, frozenset({"-p", "--package"}))
    downloads = any(arg in ("-y", "--yes") for arg in args) or "@" in package[1:] or package.startswith("create-")
    return f"{name} {package} (downloads)" if downloads else ""


def _uv(name: str, args: Sequence[str]) -> str:
    words = _positional(args, "--directory --project --cache-dir -p --python")
    if not words:
        return ""
    second = words[1] if len(words) > 1 else ""
    if words[0] == "pip":
        return f"uv pip {second}" if second in ("install", "sync", "compile") else ""
    if words[0] in ("tool", "python"):
        return f"uv {words[0]} {second}" if second in ("install", "run", "upgrade") else ""
    return f"uv {words[0]}" if words[0] in ("sync", "add", "run", "lock", "build", "remove") else ""


def _two_words(name: str, args: Sequence[str]) -> str:
    """`conda env create`, `rustup toolchain install`, `docker compose up`: there the second word decides."""
    subcommands, valued = _TABLE[name]
    words = _positional(args, " ".join(valued))
    first, second = [*words, "", ""][:2]
    if first not in subcommands:
        return ""
    if first in ("env", "toolchain", "component", "target", "compose", "buildx", "switch"):
        active = ("create", "update", "install", "add", "up", "build", "pull", "bake", "run")
        return f"{name} {first} {second}" if second in active else ""
    return f"{name} {first}"


def _git(name: str, args: Sequence[str]) -> str:
    words = _positional(args, "-C -c --git-dir --work-tree -b --branch --depth -o --origin -j --jobs --filter")
    if words[:1] == ["clone"]:
        return "git clone of a remote" if any(_REMOTE_REPO.match(word) for word in words[1:2]) else ""
    if words[:2] in (["lfs", "pull"], ["lfs", "fetch"], ["submodule", "update"]):
        return f"git {words[0]} {words[1]}"
    return ""


def _download(name: str, args: Sequence[str]) -> str:
    urls = _positional(args, "-o -O --output -H --header -d --data -X -u --user -A -b -c -T -F --request -P")
    if not urls or all(_LOCAL.match(url) for url in urls):
        return ""
    if name == "curl" and not any(re.match(r"-[a-zA-Z]*[oO]|--output|--remote-name", arg) for arg in args):
        return ""
    return f"{name} download"


def _flags(heavy_flags: str) -> Rule:
    flags = tuple(heavy_flags.split())

    def rule(name: str, args: Sequence[str]) -> str:
        hit = next((arg for arg in args if arg.split("=")[0] in flags), "")
        return f"{name} {hit}" if hit else ""

    return rule


def _pacman(name: str, args: Sequence[str]) -> str:
    return next((f"{name} {arg}" for arg in args if arg.startswith(("-S", "-U")) and not arg.startswith("-Ss")), "")


def _threads(name: str, args: Sequence[str]) -> str:
    width = option_value(args, "-T", "--threads")
    return f"{name} -T" if width is not None and width != "1" else ""


def _jobs(name: str, args: Sequence[str]) -> str:
    jobs = option_value(args, "-j", "--parallel", "--jobs")
    return f"{name} -j" if jobs is not None and jobs != "1" else ""


def _parallel(name: str, args: Sequence[str]) -> str:
    return "" if option_value(args, "-j", "--jobs") == "1" else "parallel"


def _jest(name: str, args: Sequence[str]) -> str:
    serial = {"--runInBand", "-i", "--maxWorkers=1", "-w1"}
    return "" if serial & set(args) else "jest without --runInBand"


def _r(name: str, args: Sequence[str]) -> str:
    if list(args[:2]) == ["CMD", "INSTALL"]:
        return "R CMD INSTALL"
    installs = ("install.packages", "remotes::install", "devtools::install", "BiocManager::install")
    return "R install.packages" if any(call in arg for arg in args for call in installs) else ""


def _compiler(name: str, args: Sequence[str]) -> str:
    if any(arg.startswith("-flto") for arg in args):
        return f"{name} -flto"
    sources = sum(1 for arg in args if _SOURCE.match(arg))
    return f"{name} with {sources} sources" if sources > _MANY_SOURCES else ""


_TABLE: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (_words(subcommands), _words(valued))
    for names, (subcommands, valued) in _SUBCOMMANDS.items()
    for name in names.split()
}

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("make", "gmake", "bmake"), _make),
    **dict.fromkeys(("pytest", "py.test"), _pytest),
    **dict.fromkeys(("npm", "pnpm", "yarn", "bun"), _node),
    **dict.fromkeys(("npx", "bunx", "pnpx"), _npx),
    **dict.fromkeys(("conda", "mamba", "micromamba", "rustup", "docker", "podman", "nerdctl", "opam"), _two_words),
    **dict.fromkeys(("curl", "wget"), _download),
    **dict.fromkeys(("xz", "zstd"), _threads),
    **dict.fromkeys(("R", "Rscript"), _r),
    "go": _go,
    "uv": _uv,
    "git": _git,
    "dpkg": _flags("-i --install --unpack --configure"),
    "rpm": _flags("-i -U -ivh -Uvh --install --upgrade"),
    "cmake": _flags("--build --install"),
    "tsc": _flags("-b --build"),
    "mysqld": _flags("--initialize --initialize-insecure"),
    "pacman": _pacman,
    "ctest": _jobs,
    "parallel": _parallel,
    "jest": _jest,
}
