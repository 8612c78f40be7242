"""One line for each event worth a line."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from agentrl.records import AttemptId, GroupId
from agentrl.tui.draw import BAD, DIM, FAIR, GOOD, counted, took

_QUIET = {"Tick", "Progressed", "EngineLoads", "SandboxHostLoads", "TaskOffered", "AttemptBegan"}
_BAD_NEWS = {"DropGroup", "RestartEngine"}
_STYLE = {
    "AttemptFailed": FAIR,
    "EngineDown": BAD,
    "SandboxHostDown": BAD,
    "TrainerDown": BAD,
    "EngineLoadFailed": BAD,
    "StepFinished": GOOD,
    "EngineLoaded": "cyan",
    "EngineUp": GOOD,
    "SandboxHostUp": GOOD,
}


class Entry(tuple[float, str, str]):
    """(when, what, style)."""

    @property
    def text(self) -> Text:
        at, what, style = self
        return Text.assemble((f"{took(at):>6} ", DIM), (what, style))


def entries(said: dict[str, Any]) -> list[Entry]:
    """Of one {"now", "event", "commands"}: the event, and those of its orders that nothing else tells of."""
    now, event = said["now"], said["event"]
    found = []
    if event["type"] not in _QUIET:
        found.append(Entry((now, _event(event), _STYLE.get(event["type"], ""))))
    told = [(order["type"], _order(order)) for order in said["commands"]]
    found += [Entry((now, what, FAIR if kind in _BAD_NEWS else "")) for kind, what in told if what]
    return found


def _event(event: dict[str, Any]) -> str:
    kind = str(event["type"])
    if kind == "AttemptEnded":
        facts = event["facts"]
        did = counted(facts.get("turns", 0), "turn"), counted(facts["tokens"], "token"), facts.get("stop", "submitted")
        return f"{_attempt(facts['attempt'])} ended: reward {facts['reward']:.2f}, {', '.join(did)}"
    if kind == "AttemptFailed":
        return f"{_attempt(event['attempt'])} failed ({event['blame']}): {event['detail']}"
    if kind == "StepFinished":
        return f"step on batch {event['batch']} made v{event['version']} in {took(event['seconds'])}"
    if kind == "TrainerReady":
        return f"trainer asks for a batch, at v{event['version']}"
    if kind in ("EngineUp", "EngineStaged", "EngineLoaded", "EngineLoadFailed"):
        verb = {"EngineUp": "up with", "EngineStaged": "staged", "EngineLoaded": "serves"}.get(kind, "did not take")
        return f"engine {event['engine']} {verb} v{event['version']}" + _detail(event.get("detail"))
    if kind in ("EngineDown", "SandboxHostDown", "TrainerDown"):
        who = event.get("engine") or event.get("host") or ""
        return f"{'trainer' if kind == 'TrainerDown' else who} down" + _detail(event["reason"])
    if kind == "SandboxHostUp":
        return f"sandbox host {event['host']} up, {event['capacity']} sandboxes"
    if kind == "PauseAsked":
        return "paused" if event["on"] else "goes on"
    return {"DrainAsked": "drain asked for", "Resumed": "a new process took over"}.get(kind, kind)


def _order(order: dict[str, Any]) -> str:
    kind = order["type"]
    if kind == "TrainOn":
        groups = ", ".join(f"g{proof['group']}" for proof in order["proofs"])
        return f"batch {order['batch']} cut: {groups}"
    if kind == "DropGroup":
        return f"g{order['group']} dropped: {order['reason']}"
    if kind == "SwapWeights":
        return f"engine {order['engine']} swaps to v{order['version']}"
    if kind == "RestartEngine":
        return f"engine {order['engine']} is restarted" + _detail(order["reason"])
    if kind == "Finish":
        return f"the run is over: {order['outcome']}" + _detail(order.get("detail"))
    return ""


def _attempt(parts: tuple[GroupId, int, int]) -> str:
    return str(AttemptId(*parts))


def _detail(text: str | None) -> str:
    return f": {text}" if text else ""
