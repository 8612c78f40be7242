"""Each law can be broken: a bug is planted in the scheduler, and the checker must name the law it breaks.

A checker that never fails proves nothing. Every bug here is one that a hurried change could bring: a forgotten line, a
comparison off by one, news believed without looking at whom it speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from agentrl.records import AttemptId, Place
from agentrl.scheduler import attempts, cut, fleet, freshness, publication
from agentrl.scheduler import commands as order
from agentrl.scheduler import events as news
from agentrl.scheduler.bank import Bank
from agentrl.scheduler.core import Core
from agentrl.scheduler.groups import Group, Member, Table
from agentrl.scheduler.laws import LawBroken
from agentrl.scheduler.routing import Engine, Router
from agentrl.scheduler.state import State
from tests.laws.world import World

WORLDS = 150  # seeds to look in before a bug counts as not caught

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: list[tuple[int, Plant]] = []


def bug(law: int) -> Callable[[Plant], Plant]:
    def listed(plant: Plant) -> Plant:
        BUGS.append((law, plant))
        return plant

    return listed


@contextmanager
def believing(core: State, **changes: object) -> Iterator[None]:
    """The core works by another policy than the one that the laws hold it to."""
    true = core.policy
    core.policy = msgspec.structs.replace(true, **changes)
    try:
        yield
    finally:
        core.policy = true


@contextmanager
def wider(core: State, *, groups: int = 0, attempts: int = 0) -> Iterator[None]:
    """The core works by a window so much wider than the one that the laws hold it to."""
    core.window.groups += groups
    core.window.attempts += attempts
    try:
        yield
    finally:
        core.window.groups -= groups
        core.window.attempts -= attempts


# --- law 1: the ledger ------------------------------------------------------------------------------------------------


@bug(1)
def a_dropped_group_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    real = attempts.drop

    def drop(state: State, group: Group, reason: str) -> None:
        real(state, group, reason)
        state.ledger.dropped[reason] -= 1

    patch.setattr(attempts, "drop", drop)


@bug(1)
def a_dropped_group_is_not_announced(patch: pytest.MonkeyPatch) -> None:
    real = attempts.drop

    def drop(state: State, group: Group, reason: str) -> None:
        real(state, group, reason)
        state.out = [o for o in state.out if not isinstance(o, order.DropGroup)]

    patch.setattr(attempts, "drop", drop)


@bug(1)
def a_step_counts_its_groups_twice(patch: pytest.MonkeyPatch) -> None:
    real = Core._stepped

    def stepped(core: Core, event: news.StepFinished, now: float) -> None:
        before = core.ledger.trained
        real(core, event, now)
        core.ledger.trained += core.ledger.trained - before

    patch.setattr(Core, "_stepped", stepped)


# --- law 2: freshness -------------------------------------------------------------------------------------------------


@bug(2)
def nothing_is_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attempts, "refuse_if_stale", lambda state, group: None)


@bug(2)
def the_sweep_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    real = attempts.refuse_if_stale

    def refuse_if_stale(state: State, group: Group) -> None:
        with believing(state, bound=state.policy.bound + 1):
            real(state, group)

    patch.setattr(attempts, "refuse_if_stale", refuse_if_stale)


@bug(2)
def a_group_is_as_old_as_its_newest_member(patch: pytest.MonkeyPatch) -> None:
    def refuse_if_stale(state: State, group: Group) -> None:
        known = [member.oldest for member in group.members if member.oldest is not None]
        if known and freshness.is_stale(state.version, max(known), state.policy.bound):
            attempts.drop(state, group, "stale")

    patch.setattr(attempts, "refuse_if_stale", refuse_if_stale)


@bug(2)
def what_waits_in_the_bank_does_not_grow_old(patch: pytest.MonkeyPatch) -> None:
    real = attempts.refuse_if_stale

    def refuse_if_stale(state: State, group: Group) -> None:
        if group.ready is None:
            real(state, group)

    patch.setattr(attempts, "refuse_if_stale", refuse_if_stale)


# --- law 3: progress --------------------------------------------------------------------------------------------------


@bug(3)
def the_stall_watch_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "next_deadline", lambda core: core.table.next_deadline())


# --- law 4: slots -----------------------------------------------------------------------------------------------------


@bug(4)
def one_attempt_too_many_runs(patch: pytest.MonkeyPatch) -> None:
    real = Core._start

    def start(core: Core, now: float) -> None:
        with wider(core, attempts=1):
            real(core, now)

    patch.setattr(Core, "_start", start)


@bug(4)
def a_slot_is_freed_before_its_attempt_ends(patch: pytest.MonkeyPatch) -> None:
    real = attempts.began

    def began(state: State, event: news.AttemptBegan, now: float) -> None:
        real(state, event, now)
        attempts.release(state, event.attempt)

    patch.setattr(attempts, "began", began)


# --- law 5: ids never repeat ------------------------------------------------------------------------------------------


@bug(5)
def a_new_try_takes_the_number_of_the_old_one(patch: pytest.MonkeyPatch) -> None:
    real = Table.wait_again

    def wait_again(table: Table, group: Group, member: Member, until: float | None = None) -> None:
        member.tries -= 1
        real(table, group, member, until)

    patch.setattr(Table, "wait_again", wait_again)


# --- law 6: placements ------------------------------------------------------------------------------------------------


@bug(6)
def work_goes_to_an_engine_that_does_not_serve(patch: pytest.MonkeyPatch) -> None:
    def place(router: Router, attempt: AttemptId, **_: object) -> Place | None:
        return max((rank.place for engine in router.engines.values() for rank in engine.ranks), default=None)

    patch.setattr(Router, "place", place)


@bug(6)
def a_sandbox_place_leaks(patch: pytest.MonkeyPatch) -> None:
    real = attempts.release

    def release(state: State, attempt: AttemptId) -> None:
        member = state.table.running.get(attempt)
        real(state, attempt)
        if member is not None:
            state.host_load[member.host] += 1

    patch.setattr(attempts, "release", release)


@bug(6)
def a_moved_conversation_is_counted_at_its_old_place(patch: pytest.MonkeyPatch) -> None:
    real = fleet.lose

    def lose(state: State, engine: object) -> None:
        before = {attempt: member.place for attempt, member in state.table.running.items()}
        real(state, engine)  # type: ignore[arg-type]
        for attempt, member in state.table.running.items():
            member.place = before[attempt]

    patch.setattr(fleet, "lose", lose)


# --- law 7: whole groups ----------------------------------------------------------------------------------------------


@bug(7)
def the_worst_sibling_is_left_out(patch: pytest.MonkeyPatch) -> None:
    real = Group.counted
    patch.setattr(Group, "counted", lambda group: sorted(real(group), key=lambda f: f.reward)[1:] or real(group))


@bug(7)
def a_batch_is_cut_one_group_short(patch: pytest.MonkeyPatch) -> None:
    real = Core._fill

    def fill(core: Core, now: float) -> None:
        with believing(core, groups=max(1, core.policy.groups - 1)):
            real(core, now)

    patch.setattr(Core, "_fill", fill)


# --- law 8: one step, one version -------------------------------------------------------------------------------------


@bug(8)
def a_step_skips_a_version(patch: pytest.MonkeyPatch) -> None:
    real = Core._stepped

    def stepped(core: Core, event: news.StepFinished, now: float) -> None:
        real(core, msgspec.structs.replace(event, version=event.version + 1), now)

    patch.setattr(Core, "_stepped", stepped)


@bug(8)
def a_trainer_that_comes_back_is_given_another_batch(patch: pytest.MonkeyPatch) -> None:
    real = Core._trainer_ready

    def ready(core: Core, event: news.TrainerReady, now: float) -> None:
        if core.training is not None and core.trainer == "absent":
            core.training = msgspec.structs.replace(core.training, attempts=core.training.attempts[::-1])
        real(core, event, now)

    patch.setattr(Core, "_trainer_ready", ready)


# --- law 9: the window ------------------------------------------------------------------------------------------------


@bug(9)
def a_place_frees_when_the_step_begins(patch: pytest.MonkeyPatch) -> None:
    """Only open groups are counted at admission; those in training and those not live yet keep their places."""
    real = cut.may_admit

    def may_admit(state: State) -> bool:
        with wider(state, groups=state.places_used - len(state.table.groups)):
            return real(state)

    patch.setattr(cut, "may_admit", may_admit)


# --- law 10: publication ----------------------------------------------------------------------------------------------


@bug(10)
def late_news_takes_an_engine_back(patch: pytest.MonkeyPatch) -> None:
    real = fleet.engine_said

    def engine_said(state: State, event: object, now: float) -> None:
        real(state, event, now)  # type: ignore[arg-type]
        if isinstance(event, news.EngineLoaded) and event.engine in state.router.engines:
            state.router.engines[event.engine].version = event.version

    patch.setattr(fleet, "engine_said", engine_said)


@bug(10)
def all_engines_swap_at_once(patch: pytest.MonkeyPatch) -> None:
    real = publication.to_swap
    patch.setattr(
        publication,
        "to_swap",
        lambda engines, target, *, order, max_unavailable: real(engines, target, order=order, max_unavailable=9),
    )


# --- law 11: the bank -------------------------------------------------------------------------------------------------


@bug(11)
def a_dropped_group_stays_in_the_bank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bank, "discard", lambda bank, group: None)


@bug(11)
def a_group_is_ready_one_sibling_early(patch: pytest.MonkeyPatch) -> None:
    real = attempts.ended

    def ended(state: State, event: news.AttemptEnded, now: float) -> None:
        with believing(state, siblings=max(1, state.policy.siblings - 1)):
            real(state, event, now)

    patch.setattr(attempts, "ended", ended)


# --- law 12: the same events give the same commands -------------------------------------------------------------------


def test_law_12_a_decision_that_depends_on_something_else_does_not_replay() -> None:
    class Moody(Core):
        """Decides by its mood, which no journal knows."""

        best = min

        def _host(self) -> str | None:
            return type(self).best((h for h, c in self.hosts.items() if self.host_load[h] < c), default=None)

    world = World(0, core=Moody)
    world.run()
    Moody.best = max
    fresh = Moody(world.policy)
    assert any(fresh.handle(event, now) != commands for now, event, commands in world.log)


# --- law 13: one version a trajectory ---------------------------------------------------------------------------------


@bug(13)
def an_engine_swaps_under_running_work_and_does_not_say_so(patch: pytest.MonkeyPatch) -> None:
    real = fleet.swap

    def swap(state: State, engine: Engine) -> None:
        said = {attempt: state.table.running[attempt].fell_back for attempt in engine.attempts()}
        real(state, engine)
        for attempt, before in said.items():
            state.table.running[attempt].fell_back = before

    patch.setattr(fleet, "swap", swap)


@bug(13)
def a_conversation_that_lost_its_engine_goes_on_anywhere(patch: pytest.MonkeyPatch) -> None:
    def place(state: State, attempt: AttemptId, member: Member, *, history: float | None = None) -> Place | None:
        return state.router.place(attempt, history=history)

    patch.setattr(attempts, "place", place)


@bug(13)
def a_resumed_conversation_is_as_new_as_its_engine(patch: pytest.MonkeyPatch) -> None:
    """What it carries is forgotten, so that neither its place nor its beginning says that it is older."""
    real = Table.wait_again

    def wait_again(table: Table, group: Group, member: Member, until: float | None = None) -> None:
        real(table, group, member, until)
        member.oldest = None

    def began(state: State, event: news.AttemptBegan, now: float) -> None:
        member = state.table.running.get(event.attempt)
        if member is not None:
            member.oldest = event.oldest

    patch.setattr(Table, "wait_again", wait_again)
    patch.setattr(attempts, "began", began)


# --- law 14: where the cut waits, nothing expires ---------------------------------------------------------------------


@bug(14)
def the_cut_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(freshness, "can_follow", lambda floors, batch_groups, trainer, bound: True)


# --- the hunt ---------------------------------------------------------------------------------------------------------


def broken() -> LawBroken | None:
    """The first law that breaks in any of the worlds."""
    for seed in range(WORLDS):
        try:
            World(seed).run()
        except LawBroken as found:
            return found
        except (AssertionError, KeyError, IndexError):
            continue  # the bug broke the core itself before any law could speak
    return None


@pytest.mark.parametrize(("law", "plant"), BUGS, ids=lambda part: getattr(part, "__name__", f"law{part}"))
def test_a_planted_bug_breaks_its_law(law: int, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = broken()
    assert found is not None, f"not caught in {WORLDS} worlds"
    assert found.law == law, str(found)


def test_every_law_of_the_checker_has_a_planted_bug() -> None:
    by_hand = {12}  # replay is no law of one state: it is shown above
    assert {law for law, _ in BUGS} == set(range(1, 15)) - by_hand
