"""The package-heavy detector: a table of what is heavy and what only looks so, and its laws."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Lane
from agentrl.sandbox.detector import MAX_CHARS, classify
from agentrl.sandbox.shell import ShellSyntaxError, split_commands

HEAVY = [
    # package managers
    ("apt-get install -y jq", "apt-get install"),
    ("apt -y -q update", "apt update"),
    ("apt-get -o Acquire::Retries=3 install jq", "apt-get install"),
    ("/usr/bin/apt-get upgrade", "apt-get upgrade"),
    ("dpkg -i x.deb", "dpkg -i"),
    ("dpkg --configure -a", "dpkg --configure"),
    ("dnf install gcc", "dnf install"),
    ("apk add --no-cache git", "apk add"),
    ("pacman -Syu", "pacman -Syu"),
    ("pip install numpy", "pip install"),
    ("pip3.11 --no-cache-dir install .", "pip install"),
    ("python -m pip install -r r.txt", "pip install"),
    ("python3.11 -X dev -m pip wheel .", "pip wheel"),
    ("uv pip install x", "uv pip install"),
    ("uv sync", "uv sync"),
    ("uv --directory sub run pytest", "uv run"),
    ("poetry add requests", "poetry add"),
    ("pipx install black", "pipx install"),
    ("python setup.py develop", "setup.py develop"),
    ("python3 -m build --wheel", "python -m build"),
    ("python -m venv .venv", "python -m venv (installs pip)"),
    ("tox -e py311", "tox"),
    ("conda env create -f env.yml", "conda env create"),
    ("mamba -n x install numpy", "mamba install"),
    ("npm ci", "npm ci"),
    ("npm run build", "npm run build"),
    ("yarn", "yarn (installs)"),
    ("pnpm --filter web add react", "pnpm add"),
    ("npx -y create-react-app x", "npx create-react-app (downloads)"),
    ("tsc -b", "tsc -b"),
    ("gem install rails", "gem install"),
    ("composer require x/y", "composer require"),
    ("Rscript -e 'install.packages(\"x\")'", "R install.packages"),
    # builds
    ("make", "make"),
    ("make -j", "make -j"),
    ("make -j8 clean all", "make -j"),
    ("make -C sub -j 4", "make -j"),
    ("cmake --build build --parallel", "cmake --build"),
    ("./configure --prefix=/usr", "configure"),
    ("sh configure", "configure"),
    ("ninja -C out", "ninja"),
    ("cargo +nightly build --release", "cargo build"),
    ("cargo test", "cargo test"),
    ("go build ./cmd/x", "go build"),
    ("go test ./...", "go test ./..."),
    ("go mod download", "go mod download"),
    ("mvn -q package", "mvn"),
    ("./gradlew test", "gradlew"),
    ("dotnet restore", "dotnet restore"),
    ("g++ -O2 a.cc b.cc c.cc d.cc e.cc f.cc g.cc h.cc i.cc", "g++ with 9 sources"),
    ("gcc-12 -flto a.c", "gcc-12 -flto"),
    ("bazel build //...", "bazel build"),
    # parallel tests
    ("pytest -n auto", "pytest -n auto"),
    ("pytest -n4 tests", "pytest -n 4"),
    ("python -m pytest --numprocesses=2", "pytest -n 2"),
    ("pytest --dist loadscope", "pytest --dist"),
    ("ctest -j 8", "ctest -j"),
    ("jest", "jest without --runInBand"),
    ("cat x | xargs -P 8 -n 1 gzip", "xargs -P 8"),
    ("parallel gzip ::: *", "parallel"),
    # transfers and services
    ("git clone --depth 1 https://host/x.git", "git clone of a remote"),
    ("git clone git@host:x/y.git", "git clone of a remote"),
    ("git lfs pull", "git lfs pull"),
    ("docker build -t x .", "docker build"),
    ("docker compose up -d", "docker compose up"),
    ("wget https://host/x.tgz", "wget download"),
    ("curl -sLO https://host/x.tgz", "curl download"),
    ("xz -T0 big", "xz -T"),
    ("initdb -D data", "initdb"),
    # where it hides
    ("cd /x && pip install .", "pip install"),
    ("true; apt-get update", "apt-get update"),
    ("ls || npm install", "npm install"),
    ("ls & pip install x", "pip install"),
    ("(cd x; make)", "make"),
    ("{ make; }", "make"),
    ("if true; then cargo build; fi", "cargo build"),
    ("for i in 1 2; do pip install x$i; done", "pip install"),
    ("! make", "make"),
    ("X=$(pip install y)", "pip install"),
    ('echo "$(npm ci)"', "npm ci"),
    ("echo `make`", "make"),
    ("diff <(make) x", "make"),
    ("DEBIAN_FRONTEND=noninteractive apt-get install x", "apt-get install"),
    ("sudo -u root -E FOO=1 apt-get install x", "apt-get install"),
    ("env -u A B=1 nice -n 10 time pip install x", "pip install"),
    ("timeout -k 5 60 pip install x", "pip install"),
    ("timeout --signal=KILL 60 nohup stdbuf -oL make", "make"),
    ("taskset -c 0-3 make", "make"),
    ("flock /tmp/l -c 'make'", "make"),
    ("flock -w 10 /tmp/l make", "make"),
    ("xargs -n 1 pip install < list", "pip install"),
    ("2>&1 >log pip install x", "pip install"),
    ("pip install x &> log", "pip install"),
    ("bash -c 'pip install x'", "pip install"),
    ('bash -lc "cd x && make"', "make"),
    ("sh -e -c 'sh -c \"npm ci\"'", "npm ci"),
    ('eval "make"', "make"),
    ("su - user -c 'pip install x'", "pip install"),
    ("bash <<'EOF'\nset -e\npip install x\nEOF", "pip install"),
    ("bash <<< 'make'", "make"),
    ("cat > f <<EOF\nhello\nEOF\nmake", "make"),
    ("pip \\\n  install x", "pip install"),
    ("'pip' \"install\" x", "pip install"),
    # a parse error falls back to a search
    ("echo it's; pip install x", "pip install (found by search: a single quote is never closed)"),
    ('echo "oops; apt-get -y install x', "apt-get -y install (found by search: a double quote is never closed)"),
]

LIGHT = [
    "",
    "   \n\n",
    "ls -la",
    "echo apt-get install jq",
    "echo 'pip install x; make -j8'",
    'printf "%s\\n" "npm install"',
    "grep -rn 'apt-get install' .",
    "grep pip install.txt",
    "cat /usr/bin/apt-get",
    "ls /opt/make/install",
    "# pip install x",
    "ls # && make",
    "cat > setup.sh <<'EOF'\napt-get install -y jq\nmake -j8\nEOF",
    "cat > a <<-EOF\n\tmake\n\tEOF\nls",
    "cat <<A <<B\nmake\nA\nmake\nB\nls",
    "apt list --installed",
    "apt-cache policy jq",
    "dpkg -l",
    "pip list",
    "pip --version",
    "pip install --help",
    "python -m venv --without-pip v",
    "python -c 'import pip; install = 1'",
    "python make.py install",
    "python script.py -m pip install",
    "conda list",
    "conda env list",
    "npm ls",
    "npm test",
    "npm run test",
    "npx tsc --noEmit",
    "cargo --version",
    "go env",
    "go vet x.go",
    "go test ./pkg",
    "make -n",
    "make clean",
    "make -C sub clean",
    "gcc -o x x.c",
    "cmake ..",
    "pytest",
    "pytest tests/test_x.py::test_y",
    "pytest -n 0",
    "pytest -n 1",
    "pytest -p no:xdist -k name",
    "ctest",
    "jest --runInBand",
    "git clone ../local x",
    "git clone file:///srv/x.git",
    "git status",
    "docker ps",
    "docker compose ps",
    "curl -s localhost:8000/x -o out",
    "wget -q http://127.0.0.1:80/",
    "curl https://host/api",
    "psql -c 'select 1'",
    "command -v make",
    "taskset -p 123",
    "which make",
    "type pip",
    "tar xzf a.tgz",
    "X='make -j8' true",
    "make=1 ls",
    "sh -c 'echo make'",
    "bash script.sh install",
    "sed -i 's/make/pip install/' f",
    "awk '{print $1; system}' f",
    "echo it's fine",
    "> make",
    "sort < make",
    "cat < pip > install",
]  # fmt: skip


@pytest.mark.parametrize(("command", "reason"), HEAVY, ids=[c for c, _ in HEAVY])
def test_heavy(command: str, reason: str) -> None:
    decision = classify(command)
    assert (decision.lane, decision.reason) == (Lane.PACKAGE, reason)


@pytest.mark.parametrize("command", LIGHT)
def test_light(command: str) -> None:
    assert classify(command).lane is Lane.COMMAND


def test_nesting_is_followed_three_deep_and_no_further() -> None:
    command = "make"
    for depth in range(6):
        assert (classify(command).lane is Lane.PACKAGE) == (depth <= 3)
        command = f"eval '{command}'" if depth == 0 else "eval " + command.replace("\\", "\\\\").replace(" ", "\\ ")


SHELLISH = st.lists(
    st.sampled_from([*" \t\n;|&<>(){}'\"\\$`#-=x", "<<E\n", "$(", "make", "pip install", "sh -c ", "E\n"])
).map("".join)


@given(st.one_of(st.text(), SHELLISH))
def test_it_never_raises_and_always_says_why(command: str) -> None:
    decision = classify(command)
    assert decision.lane in (Lane.COMMAND, Lane.PACKAGE)
    assert decision.reason


@given(SHELLISH)
def test_the_tokenizer_ends_and_refuses_only_in_its_own_words(text: str) -> None:
    try:
        commands = split_commands(text)
    except ShellSyntaxError:
        return
    assert all(command.words for command in commands)


@given(st.text(alphabet=st.characters(exclude_characters="'", exclude_categories=["Cs"])))
def test_what_is_quoted_for_echo_is_never_heavy(text: str) -> None:
    assert classify(f"echo '{text}'").lane is Lane.COMMAND


@pytest.mark.parametrize(
    "unit", ["(", "$(", "`", "<<E ", "a ", "'x' ", '"', "\\", "sh -c 'a' ; ", "<<E\n", "$((", "pip "]
)
def test_time_is_bounded_on_long_input(unit: str) -> None:
    text = unit * (4 * MAX_CHARS // len(unit))
    best = min(_timed(text) for _ in range(3))
    assert best < 0.1, f"{best:.3f} s of CPU for {len(text)} characters"


def _timed(text: str) -> float:
    began = time.process_time()
    classify(text)
    return time.process_time() - began
