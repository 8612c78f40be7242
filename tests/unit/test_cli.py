"""What the command line says and with which exit code, as far as nothing is started."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.cli import common
from agentrl.errors import NoProgressError, UnavailableError, UserError
from agentrl.journal.store import SqliteJournal
from agentrl.recipe import schema, show
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.wiring import policy_of
from tests.cli import RECIPE, Done, agentrl
from tests.laws.world import World

VERBS = ["run", "rollout", "train", "publish", "plan", "doctor", "replay"]
VERBS += [f"bench {name}" for name in ("engine", "sandbox", "laws", "sim", "calibrate")]
VERBS += [f"serve {verb}" for verb in ("up", "status", "down")]
VERBS += [f"sandbox {verb}" for verb in ("up", "status", "down", "exec", "gc")]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    done = agentrl(*verb.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert f"agentrl {verb}" in done.out
    assert "--json" in done.out


def test_help_names_the_exit_codes_and_every_verb() -> None:
    done = agentrl("--help")
    assert done.code == 0
    assert "130 interrupted" in " ".join(done.out.split())
    assert all(verb.split()[0] in done.out for verb in VERBS)


def test_the_version() -> None:
    assert agentrl("--version") == Done(0, "agentrl 0.1.0\n", "")


@pytest.mark.parametrize("argv", [["frob"], ["run"], ["run", str(RECIPE), "--stepz", "3"], ["run", str(RECIPE), "-5"]])
def test_what_the_command_line_does_not_know_is_the_users_error(argv: list[str]) -> None:
    done = agentrl(*argv)
    assert (done.code, done.out) == (2, "")
    assert "--help" in done.err


def test_starting_up_brings_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "aiohttp", "numpy", "jinja2", "tokenizers", "psutil"}
    code = (
        "import sys\nfrom agentrl.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        f"print(*set(sys.modules) & {heavy})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("override", "words", "hint"),
    [
        ("batch.group=4", "batch.group", "did you mean groups?"),
        ("batch.groups=four", "found 'four', expected int", "correct"),
        ("engines.kind=vllm", "expected one of: embedded, sglang", ""),
        ("window.groups=1", "can never fill a batch", "at least"),
        ("model.path=/nowhere", "/nowhere/config.json is missing", "builtin:tiny"),
        ("tasks.kinds=['juggle']", "no chore 'juggle'", "Choose from"),
    ],
)
def test_a_wrong_recipe_is_one_clear_error(tmp_path: Path, override: str, words: str, hint: str) -> None:
    done = agentrl("run", RECIPE, "--run-dir", tmp_path / "run", "--set", override)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert hint in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run").exists(), "nothing is made before the input is known to be right"


def test_with_json_an_error_is_the_document() -> None:
    done = agentrl("plan", RECIPE, "--json", "--set", "batch.group=4")
    assert done.code == 2
    assert done.document["error"]["kind"] == "RecipeError"
    assert done.document["error"]["hint"] == "did you mean groups?"
    assert done.document["error"]["exit_code"] == 2


def test_plan_shows_what_follows() -> None:
    done = agentrl("plan", RECIPE)
    assert (done.code, done.err) == (0, "")
    assert "rule of thumb: at least 2 W/B = 4" in done.out
    assert agentrl("plan", RECIPE, "--quiet") == Done(0, "", "")
    document = agentrl("plan", RECIPE, "--json").document
    assert document["works"] is True
    assert document["window"]["surplus"] == 4
    assert document["step"]["trajectories"] == 32
    assert {lane["lane"] for lane in document["lanes"]} == {"reset", "command", "package", "verify", "cleanup"}


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("window.groups=2", "window.groups"),
        ("engines.kv_tokens=100", "engines.kv_tokens"),
        ("model.path=/nowhere", "model.path"),
        ("sandbox.serving_cpus='999'", "sandbox.serving_cpus"),
    ],
)
def test_a_plan_that_cannot_work_says_so_first(override: str, where: str) -> None:
    done = agentrl("plan", RECIPE, "--json", "--set", override)
    assert done.code == 2
    assert done.document["works"] is False
    assert done.document["problems"][0]["where"] == where
    assert done.document["problems"][0]["fatal"] is True
    assert "cannot work" in agentrl("plan", RECIPE, "--set", override).out.splitlines()[0]


def test_serve_dry_run_prints_commands_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = agentrl("serve", "up", RECIPE, "--dry-run", "--json", "--set", "engines.base_port=7000").document
    assert [command["name"] for command in commands] == ["e0", "e1"]
    argv = commands[1]["argv"]
    assert argv[argv.index("--port") + 1] == "7001"
    sglang = ["--set", "engines.kind=sglang", "--set", "engines.python=/opt/python"]
    lines = agentrl("serve", "up", RECIPE, "--dry-run", *sglang).out.splitlines()
    assert lines[1].startswith("HF_HUB_OFFLINE=1") or " /opt/python -m sglang.launch_server " in lines[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["serve", "sandbox"])
def test_what_is_not_up_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert agentrl(kind, "status", RECIPE).code == 3
    assert agentrl(kind, "status", RECIPE, "--json").document["serving"] is None
    assert agentrl(kind, "down", RECIPE, "--json") == Done(0, '{\n  "recipe": "local",\n  "stopped": false\n}\n', "")
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_command_needs_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = agentrl("sandbox", "exec", RECIPE, "--", "ls", "--debug")
    assert (done.code, done.out) == (3, "")
    assert "agentrl sandbox up" in done.err


@pytest.mark.parametrize("verb", [["publish"], ["replay"], ["train", str(RECIPE), "--attach"]])
def test_a_folder_that_is_no_run(tmp_path: Path, verb: list[str]) -> None:
    done = agentrl(*verb, tmp_path)
    assert (done.code, done.out) == (2, "")
    assert f"{tmp_path}: no run here (recipe.toml is missing)" in done.err


def test_training_needs_a_live_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = agentrl("train", RECIPE)
    assert done.code == 3
    assert "train.embedded=false" in done.err
    folder = tmp_path / "runs" / "over"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE.read_text())
    done = agentrl("train", RECIPE, "--attach", folder)
    assert done.code == 3
    assert f"{folder}: not live" in done.err


# --- replay -----------------------------------------------------------------------------------------------------------


def recorded(folder: Path, seed: int = 3, *, tamper: int = 0) -> int:
    """A run in the rude little world, journalled as the driver does it. tamper: the event whose digest is spoilt."""
    recipe = schema.Recipe(name="world", steps=4, batch=schema.Batch(groups=2, siblings=2))
    world = World(seed, policy=msgspec.structs.replace(policy_of(recipe), attempt_timeout_s=60.0, stall_s=2000.0))
    world.run()
    schedule = schema.Schedule(attempt_timeout_s=60.0, stall_s=2000.0)
    folder.mkdir()
    (folder / "recipe.toml").write_text(show.dump(msgspec.structs.replace(recipe, schedule=schedule)))

    async def write() -> None:
        journal = SqliteJournal.open(folder / "run.sqlite")
        for seq, (now, event, commands) in enumerate(world.log, start=1):
            digest = orders.digest(commands) if seq != tamper else bytes(8)
            journal.record_event(now, news.encode(event), digest)
        await journal.aclose()

    asyncio.run(write())
    return len(world.log)


def test_a_journal_replays_and_breaks_no_law(tmp_path: Path) -> None:
    events = recorded(tmp_path / "run")
    done = agentrl("replay", tmp_path / "run", "--laws", "--json")
    assert done.code == 0
    assert done.document["identical"] is True
    assert done.document["events"] == events
    assert done.document["steps"] == 4
    assert "identical" in agentrl("replay", tmp_path / "run").out


def test_the_first_other_decision_is_named(tmp_path: Path) -> None:
    events = recorded(tmp_path / "run", tamper=20)
    done = agentrl("replay", tmp_path / "run", "--json")
    assert done.code == 1
    assert done.document["identical"] is False
    assert done.document["difference"]["seq"] == 20 < events
    assert done.document["difference"]["expected"] == "00" * 8
    assert "type" in done.document["difference"]["event"]
    assert "differs at event 20" in agentrl("replay", tmp_path / "run").out


def test_another_policy_decides_otherwise(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    file = tmp_path / "run" / "recipe.toml"
    text = file.read_text()
    file.write_text(text.replace("[window]\ngroups = 0", "[window]\ngroups = 7"))
    assert file.read_text() != text
    assert agentrl("replay", tmp_path / "run").code == 1


# --- what all share ---------------------------------------------------------------------------------------------------


def failing(exc: BaseException) -> Any:
    def body() -> None:
        raise exc

    return body


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (UserError("x"), 2),
        (UnavailableError("x"), 3),
        (NoProgressError("x"), 4),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device", "f"), 3),
        (ValueError("x"), 1),
        (ExceptionGroup("", [ValueError("y"), ExceptionGroup("", [UserError("x")])]), 2),
    ],
)
def test_exit_codes_are_honest(exc: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert common.guarded(failing(exc), debug=False) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err


def test_a_document_is_json_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_json({"path": Path("/x"), "never": float("nan"), "n": random.Random(1).random()})
    assert msgspec.json.decode(capsys.readouterr().out)["never"] is None
