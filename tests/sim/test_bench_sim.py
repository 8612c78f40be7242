"""Every arm of `bench sim` in a small configuration: deterministic, complete, and the ladder's steps in their order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec
import pytest

from agentrl.bench.figures import draw
from agentrl.bench.fleet import Recorder, play
from agentrl.bench.sim import ladder, main, peers, publication, rounds, serving, speed
from agentrl.bench.sim.policies import PEERS, Dispatcher, Eager, FixedPool, Lead
from agentrl.bench.sim.sheet import Claim, Sheet, Table, beside, interval
from agentrl.recipe.load import load_sim
from agentrl.recipe.sim import SimRecipe
from agentrl.records import GroupId
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.wiring.fleet import Options, simulate

RECIPES = Path(__file__).parents[2] / "recipes" / "sim"
SMALL = ("steps=2", "fleet.hosts=2", "policy.groups=2", "policy.siblings=4", "policy.window_groups=4")
BRIEF = ("workload.overrides.turns=0.3",)


def small(*more: str, name: str = "terminal-bench-b300") -> SimRecipe:
    return load_sim(RECIPES / f"{name}.toml", overrides=[*SMALL, *more])


def figures(sheet: Sheet) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(sheet, wall_s=0.0))


@pytest.mark.parametrize("arm", ["ladder", "publication", "peers", "rounds", "window"])
def test_an_arm_is_complete_and_the_same_twice(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "DEPTHS", (2, 4))
    monkeypatch.setattr(rounds, "ROUND_STEPS", (2,))
    recipe = small(*BRIEF)
    first, second = main.run(recipe, arm, 1), main.run(recipe, arm, 1)
    assert figures(first) == figures(second)
    assert first.mode == "simulated"
    assert all("simulated" in table.title for table in first.tables if table.title and "pause" not in table.title)
    assert all(len(row) == len(table.columns) for table in first.tables for row in table.rows)


def test_other_workloads_have_no_claims_of_terminal_bench() -> None:
    recipe = small(*BRIEF, name="swe-bench-b300")
    assert main.run(recipe, "ladder", 1).claims == ()
    [claim] = main.run(recipe, "publication", 1).claims
    assert claim.published == publication.LIVE_SHARE


@pytest.mark.slow  # the other arms are, in `make test`
def test_serving_is_complete_and_the_same_twice() -> None:
    recipe = small("fleet.hosts=1")
    first, second = (figures(serving.run(recipe, 1, offered=16)) for _ in range(2))
    assert first == second
    sheet = msgspec.json.decode(first, type=Sheet)
    assert len(sheet.tables[0].rows) == len(sheet.data["points"]) == 12
    assert len(sheet.claims) == 8


def test_the_ladders_steps_help_in_their_order() -> None:
    """On one host that 2 x 12 conversations nearly fill with package work: each step shortens a batch."""
    more = ("steps=5", "fleet.hosts=1", "fleet.cpus_per_host=24", "fleet.serving_cpus=8", "policy.siblings=12")
    recipe = small(*more, "workload.overrides.turns=0.5")
    runs = [
        mean(
            play(ladder.recipe_of(recipe, arm), seed, Options(fixed_weights=True, per_request=arm.per_request))[
                "mean_s"
            ]
            for seed in range(3)
        )
        for arm in ladder.arms(recipe)
    ]
    assert runs == sorted(runs, reverse=True)


def test_every_batch_of_every_arm_has_the_same_size() -> None:
    recipe = small(*BRIEF)
    for arm in ladder.arms(recipe):
        recorder = Recorder()
        options = Options(fixed_weights=True, per_request=arm.per_request)
        simulate(ladder.recipe_of(recipe, arm), 0, options, recorder, watch=recorder.watch)
        assert [cut["trajectories"] for cut in recorder.cuts] == [8, 8]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name.split("(")[0].strip())
def test_peers_obey_the_laws_they_can_obey(peer: peers.Peer) -> None:
    """The driver audits all laws at every step; bound and window are the peer's own where it has no others."""
    result = peers.play(small(*BRIEF, "steps=4", "policy.K=2"), peer, 4, seed=3)
    assert result["outcome"] == "done"
    assert len(result["intervals_s"]) == 2
    assert not peer.bound or result["age_max"] <= 2


class Pressed(Recorder):
    """What a policy allowed at its worst."""

    def __init__(self) -> None:
        super().__init__()
        self.most_incomplete = 0
        self.most_ahead = 0
        self.most_running = 0

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        super().heard(now, event, commands, core)
        opened = core.ledger.completed + len(core.table.groups) - len(core.bank)
        self.most_incomplete = max(self.most_incomplete, len(core.table.groups) - len(core.bank))
        self.most_ahead = max(self.most_ahead, opened - core.version * core.policy.groups)
        self.most_running = max(self.most_running, len(core.table.running))


def pressed(name: str, depth: int, *more: str) -> Pressed:
    [peer] = [peer for peer in PEERS if name in peer.name]
    recorder, recipe = Pressed(), small(*BRIEF, "steps=4", *more)

    def make(policy: Policy) -> Core:
        return peer.make(policy, depth)

    changed = peers.recipe_of(recipe, peer, depth)
    simulate(changed, 1, Options(), recorder, watch=recorder.watch, make_core=make)
    return recorder


def test_a_fixed_pool_never_holds_more_groups_in_flight_and_is_full() -> None:
    assert pressed("fixed pool", 3).most_incomplete == 3


def test_a_lead_is_counted_in_groups_opened_beyond_those_trained() -> None:
    assert pressed("lead", 4, "policy.window_attempts=64").most_ahead == 4


def test_a_dispatchers_cap_starts_at_a_batch_and_grows() -> None:
    recorder = pressed("dispatcher", 8, "policy.window_attempts=64")
    assert 8 < recorder.most_running <= 32 + 3  # whole groups open, at most one beyond the cap


def test_eager_opening_makes_the_order_of_starts_a_choice() -> None:
    for admission in ("longest-first", "shortest-group"):
        peer = next(peer for peer in PEERS if peer.admission == admission)
        assert peer.make is Eager
        assert peers.play(small(*BRIEF, "policy.window_attempts=4"), peer, 4, seed=0)["outcome"] == "done"


def test_peers_are_small() -> None:
    assert {FixedPool, Lead, Dispatcher, Eager} <= {peer.make for peer in PEERS}
    lines = Path(peers.__file__).with_name("policies.py").read_text().splitlines()
    assert len(lines) < 100 + 50 * len(PEERS)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_versions_that_pass_while_a_group_is_in_flight(width: int) -> None:
    """Little's law through the real core in the fleet world: a place is taken W / B versions long, on average."""
    recipe = small(
        "steps=60",
        "policy.siblings=2",
        "trainer.step_s=0",
        f"policy.window_groups={2 * width}",
        "policy.K=1000",
        *BRIEF,
    )
    opened: dict[GroupId, int] = {}
    passed: list[int] = []

    class Watch(Recorder):
        def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
            for command in commands:
                if isinstance(command, orders.StartAttempt):
                    opened.setdefault(command.attempt.group, core.version)
                if isinstance(command, orders.TrainOn):
                    passed.extend(core.version + 1 - opened[proof.group] for proof in command.proofs)

    simulate(recipe, 0, Options(sentinel=True), Watch())
    settled = passed[4 * width :]
    assert mean(settled) == pytest.approx(width, rel=0.06)


def test_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "DEPTHS", (2,))
    recipe = small(*BRIEF)
    sheets = [main.run(recipe, arm, 1) for arm in ("ladder", "publication", "peers", "window")]
    sheets.append(speed.run(recipe, 1, sizes=(16, 32), hosts=(1, 2), crowd=16))
    made = [path for sheet in sheets for path in draw(sheet, tmp_path)]
    drawn = {"ladder", "batch", "publication-ages", "peers", "peers-ages", "windows", "speed"}
    assert {path.stem.removeprefix(f"{recipe.name}-") for path in made} == drawn
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in made)
    assert json.loads(msgspec.json.encode(msgspec.to_builtins(sheets[0], enc_hook=str)))["arm"] == "ladder"


def test_the_simulated_speed_is_measured_and_says_so() -> None:
    sheet = speed.run(small(*BRIEF), 1, sizes=(16,), hosts=(1, 2), crowd=16)
    assert sheet.mode == "measured"
    assert [point["hosts"] for point in sheet.data["hosts"]] == [1, 2]
    assert all(point["turns"] > 0 for point in (*sheet.data["points"], *sheet.data["hosts"]))


def test_a_claim_is_fitted_near_or_missed() -> None:
    near = Claim(what="a", published=100, simulated=119)
    miss = Claim(what="b", published=100, simulated=121)
    fitted = Claim(what="c", published=100, simulated=100, fitted="derate")
    least = Claim(what="d", published=100, simulated=300, bound=True)
    assert [c.verdict for c in (near, miss, fitted, least)] == ["near", "miss", "fitted", "near"]
    table: Table = beside([near, miss, fitted, least])
    assert [row[3] for row in table.rows] == ["within 20%", "MISS", "fitted: derate", "holds"]


def test_an_interval_is_students() -> None:
    assert interval([1.0]) == 0.0
    assert interval([0.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=0.01)
    assert interval([float(i % 2) for i in range(20)]) == pytest.approx(2.093 * 0.51299 / 20**0.5, rel=0.002)
