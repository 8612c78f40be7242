"""Engines, sandbox hosts and weights: what serves, who moves where, which engine loads what."""

from __future__ import annotations

from agentrl.records import Place, Version
from agentrl.scheduler import attempts, publication
from agentrl.scheduler import commands as order
from agentrl.scheduler import events as news
from agentrl.scheduler.routing import Engine, Rank
from agentrl.scheduler.state import State


def engine_changed(state: State, event: news.EngineUp | news.EngineDown, now: float) -> None:
    known = state.router.engines.get(event.engine)
    buried = state.buried.get(event.engine, -1)
    if isinstance(event, news.EngineDown):
        if known is not None and event.epoch >= known.epoch:
            lose(state, known)
        state.buried[event.engine] = max(buried, event.epoch)
        return
    if event.epoch <= (known.epoch if known is not None else buried) or event.epoch <= buried:
        return  # said twice, or of an incarnation that is gone
    if known is not None:
        lose(state, known)
    ranks = [Rank(Place(event.engine, i), event.slots, event.kv_tokens) for i in range(event.ranks)]
    state.router.engines[event.engine] = Engine(
        event.engine, event.epoch, event.version, ranks, admitted=event.version == state.serving
    )
    state.moved_at = now


def lose(state: State, engine: Engine) -> None:
    """Its conversations move to the next best place, histories prefilled there; where there is none they wait."""
    orphans = engine.attempts()
    engine.admitted = False
    state.buried[engine.name] = engine.epoch
    for attempt in orphans:
        state.router.places.pop(attempt, None)
    del state.router.engines[engine.name]
    for attempt in orphans:
        member = state.table.running[attempt]
        place = attempts.place(state, attempt, member, history=state.router.costs.tokens)
        if place is None:
            attempts.interrupt(state, attempt, "no engine serves")
        else:
            member.place = place
            state.router.add(attempt, place)
            state.out.append(order.MoveAttempt(attempt=attempt, place=place))


def engine_said(
    state: State, event: news.EngineLoads | news.EngineStaged | news.EngineLoaded | news.EngineLoadFailed, now: float
) -> None:
    engine = state.router.engines.get(event.engine)
    if engine is None or engine.epoch != event.epoch:
        return
    match event:
        case news.EngineLoads():
            for load in event.loads:
                if 0 <= load.rank < len(engine.ranks):
                    engine.ranks[load.rank].load = load
            rebalance(state, engine)
        case news.EngineStaged():
            engine.staged = max(event.version, engine.staged or event.version)
            if engine.staging is not None and event.version >= engine.staging:
                engine.staging = None
        case news.EngineLoaded():
            if engine.swapping is not None and event.version < engine.swapping:
                state.ledger.late += 1  # of the swap before: this one goes on
                return
            engine.swapping, engine.draining, engine.failures = None, None, 0
            engine.version = max(engine.version, event.version)
            engine.admitted |= engine.version >= publication.live_version(state.engines, state.serving)
            free_places(state)
            state.moved_at = now
        case news.EngineLoadFailed():
            if event.version not in (engine.staging, engine.swapping):
                state.ledger.late += 1
                return
            engine.staging = engine.staged = engine.swapping = engine.draining = None
            engine.failures += 1
            if engine.failures > state.policy.load_retries:
                state.out.append(order.RestartEngine(engine=engine.name, epoch=engine.epoch, reason=event.detail))
                lose(state, engine)


def rebalance(state: State, engine: Engine) -> None:
    """At most one conversation a report moves, so that its effect is seen before the next."""
    if not engine.takes_work or state.policy.in_flight == "finish":
        return  # a move could change a conversation's version
    better = state.router.better(engine, state.policy.move_margin)
    if better is not None:
        attempt, place = better
        state.router.move(attempt, place)
        state.table.running[attempt].place = place
        state.out.append(order.MoveAttempt(attempt=attempt, place=place))


def host_down(state: State, event: news.SandboxHostDown) -> None:
    if state.hosts.pop(event.host, None) is not None:
        for attempt in [a for a, m in state.table.running.items() if m.host == event.host]:
            attempts.interrupt(state, attempt, f"sandbox host {event.host}: {event.reason}")


def publish(state: State, now: float) -> None:
    engines, policy = state.engines, state.policy
    for engine in publication.to_stage(engines, state.serving):
        engine.staging = state.serving
        state.out.append(order.StageWeights(engine=engine.name, epoch=engine.epoch, version=state.serving))
    for engine in publication.to_swap(
        engines, state.serving, order=policy.order, max_unavailable=policy.max_unavailable
    ):
        if policy.in_flight == "finish":
            engine.draining = now + policy.finish_timeout_s
        else:
            swap(state, engine)
    for engine in engines:
        ending = engine.draining is not None and engine.swapping is None
        if ending and (not engine.open_work or now >= (engine.draining or 0.0)):
            swap(state, engine)
    free_places(state)


def swap(state: State, engine: Engine) -> None:
    if state.policy.in_flight == "restart":
        for attempt in engine.attempts():
            attempts.start_over(state, attempt, attempts.NEW_WEIGHTS)
    for attempt in engine.attempts() if engine.draining is not None else ():
        attempts.fall_back(state, state.table.running[attempt])
    engine.swapping = state.serving
    state.out.append(order.SwapWeights(engine=engine.name, epoch=engine.epoch, version=state.serving))


def free_places(state: State) -> None:
    live = publication.live_version(state.engines, Version(-1))
    while state.held and state.held[0][0] <= live:
        state.held.popleft()
