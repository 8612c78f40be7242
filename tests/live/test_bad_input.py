"""Everything that can be wrong with what a user gives, tried on `agentrl run` as a user would: one clear error, the
right exit code, within seconds, nothing lost, no process left."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.tasks.chores.folder import generate
from tests.cli import RECIPE, Done, agentrl, left_behind, ran

pytestmark = pytest.mark.live

TINY = RECIPE.parents[1] / "agentrl" / "models" / "tiny"
SECONDS = 30.0  # on a busy machine; alone, these take one to five


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert left_behind(tmp_path) == []


def refused(place: Path, *overrides: str, code: int, says: str, recipe: Path = RECIPE, starts: bool = False) -> Done:
    """starts: found only once the run has begun, so in a process of its own. Otherwise nothing may have been made."""
    argv = ["run", recipe, "--run-dir", place / "run", "--quiet"]
    argv += [part for override in overrides for part in ("--set", override)]
    began = time.monotonic()
    done = ran(place, *argv) if starts else agentrl(*argv)
    assert starts or not (place / "run").exists()
    assert done.code == code, done.err
    assert says in done.err
    assert done.err.count("error:") >= 1
    assert "Traceback" not in done.err
    assert "bug in agentrl" not in done.err
    assert done.out == ""
    assert time.monotonic() - began < SECONDS
    return done


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "x"\n[batchs]\ngroups = 4\n', "did you mean batch?"),
        ('name = "x"\nsteps = "many"\n', "found 'many', expected int"),
        ('name = "x"\n[train]\nlr = -1.0\n', "train.lr"),
        ('name = "x"\n[freshness\nK = 1\n', "not valid TOML"),
        ("steps = 3\n", "name is missing"),
    ],
)
def test_a_recipe_that_is_wrong(place: Path, text: str, says: str) -> None:
    file = place / "wrong.toml"
    file.write_text(text)
    refused(place, recipe=file, code=2, says=says)


# --- the model --------------------------------------------------------------------------------------------------------


def cut_short(folder: Path) -> str:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    return "has 100000 bytes, its header says"


def no_header(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1_000)
    return "no readable header"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "no *.safetensors here"


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text("{")
    return "not a tokenizer"


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json is missing"


@pytest.mark.parametrize("spoil", [cut_short, no_header, no_weights, no_tokenizer, no_config])
def test_a_model_that_is_none(place: Path, spoil: Callable[[Path], str]) -> None:
    model = place / "model"
    shutil.copytree(TINY, model)
    refused(place, f"model.path={model}", code=2, says=spoil(model))


# --- the tasks --------------------------------------------------------------------------------------------------------


def no_tests(task: Path) -> str:
    (task / "tests" / "test.sh").unlink()
    return "tests/test.sh is missing"


def bad_toml(task: Path) -> str:
    (task / "task.toml").write_text("[agent\n")
    return "task.toml"


def unknown_key(task: Path) -> str:
    (task / "task.toml").write_text('schema_version = "1.0"\n[agent]\ntimeout_secs = 3\n')
    return "Did you mean timeout_sec?"


def nothing_to_do(task: Path) -> str:
    (task / "instruction.md").write_text("  \n")
    return "instruction.md is empty"


def not_text(task: Path) -> str:
    (task / "instruction.md").write_bytes(b"\xff\xfe\x00")
    return "instruction.md"


def same_name(task: Path) -> str:
    shutil.copytree(task, task.with_name("again"))
    return "are both named"


@pytest.mark.parametrize("spoil", [no_tests, bad_toml, unknown_key, nothing_to_do, not_text, same_name])
def test_a_task_folder_that_is_broken(place: Path, spoil: Callable[[Path], str]) -> None:
    tasks = place / "tasks"
    task = generate("note", 1, tasks)
    done = refused(place, "tasks.source=harbor", f"tasks.path={tasks}", code=2, says=spoil(task))
    assert "tasks.path: " in done.err


# --- engines ----------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(place, f"engines.base_port={port}", code=3, says=f"port {port} of engine e0 is taken")
        up = ran(place, "serve", "up", RECIPE, "--set", f"engines.base_port={port}")
        assert up.code == 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"version": "0.5.22", "port": "many"}', "answered nonsense"),
        (b"\x00\xff not json", "answered nonsense"),
        (b"[1, 2, 3]", "answered nonsense"),
    ],
)
def test_an_engine_that_answers_nonsense(place: Path, body: bytes, says: str) -> None:
    class Nonsense(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            refused(place, f"engines.attach={json.dumps([url, url])}", code=3, says=says, starts=True)
        finally:
            server.shutdown()


def test_engines_that_are_not_there(place: Path) -> None:
    attach = 'engines.attach=["http://127.0.0.1:1", "http://127.0.0.1:1"]'
    refused(place, attach, code=3, says="cannot be attached", starts=True)


def test_a_token_file_that_is_not_there(place: Path) -> None:
    refused(place, "engines.token_file=/nowhere/token", code=2, says="/nowhere/token")


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """10 MB: the first version fits, a trainer's checkpoint beside it does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "none", disk], check=False, capture_output=True)
    if os.getuid() != 0 or made.returncode != 0:
        pytest.skip("only root may mount a small file system")
    yield disk
    subprocess.run(["umount", disk], check=True, timeout=20)


@pytest.mark.slow
def test_a_disk_that_is_full_loses_nothing(small_disk: Path) -> None:
    argv = ["run", RECIPE, "--run-dir", small_disk / "run", "--steps", "1", "--json"]
    for override in ("batch.groups=1", "batch.siblings=2", "window.groups=2", "engines.count=1", "engines.slots=8"):
        argv += ["--set", override]
    full = ran(small_disk, *argv)
    assert full.code == 3, full.err
    said = full.document["error"]["message"]
    assert "disk full" in said or "No space left" in said
    assert left_behind(small_disk) == []
    before = agentrl("replay", small_disk / "run", "--laws", "--json").document
    assert before["identical"] is True
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True, timeout=20)
    resumed = ran(small_disk, *argv)
    assert resumed.code == 0, resumed.err
    assert resumed.document["ledger_balanced"] is True
    after = agentrl("replay", small_disk / "run", "--laws", "--json").document
    assert (after["identical"], after["processes"], after["steps"]) == (True, 2, 1)
    assert after["events"] > before["events"]


def test_a_disk_too_small_for_the_first_version(place: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(8_000_000))
    done = ran(place, "run", RECIPE, "--run-dir", small_disk / "run")
    assert done.code == 3
    assert "disk full while writing version 0" in done.err


def test_a_folder_that_cannot_be_made(place: Path) -> None:
    done = ran(place, "run", RECIPE, "--run-dir", "/proc/run")
    assert done.code == 2
    assert "/proc/run/logs: cannot be made" in done.err
