"""KV memory of one rank: what runs holds it, what rests keeps it until somebody needs the room. Pure.

A group's opening is one shared prefix; a conversation's own tokens hang below it and stay cached between turns. Idle
entries are evicted least recently used first, a conversation from its end, a prefix only after all that hang below it.

    used + free = total     always; `audit` counts it again from the entries
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

Key = tuple[int, int, Hashable]  # namespace, 0 conversation | 1 group, name


@dataclass(slots=True, eq=False)
class Prefix:
    """users: sequences that run on it; resting: idle conversations that hang below it."""

    key: Key
    tokens: float
    users: int = 0
    resting: int = 0


@dataclass(slots=True, eq=False)
class Idle:
    """A conversation between its turns. tokens: its own, the prefix not counted."""

    key: Key
    tokens: float
    prefix: Prefix | None


@dataclass(slots=True, eq=False)
class Held:
    """What a running sequence holds. own: its private tokens; cached: of its prompt, found here."""

    key: Key
    group: Key
    shared: int  # tokens of the prompt that siblings have too
    prefix: Prefix | None
    own: float
    cached: int


class Pool:
    def __init__(self, total: float) -> None:
        self.total = total
        self.held = 0.0  # private tokens of what runs, and the prefixes it runs on
        self.idle = 0.0  # evictable
        self.evicted = 0.0  # so far
        self._resting: OrderedDict[Key, Idle | Prefix] = OrderedDict()  # least recently used first
        self._prefixes: dict[Key, Prefix] = {}

    @property
    def free(self) -> float:
        return self.total - self.held - self.idle

    def match(self, namespace: int, conversation: Hashable, group: Hashable, prompt: int, shared: int) -> int:
        """Tokens of the prompt that are cached. The last one is always computed anew."""
        prefix, own = self._find(namespace, conversation, group, prompt, shared)
        return int((shared if prefix is not None else 0) + own)

    def _find(
        self, namespace: int, conversation: Hashable, group: Hashable, prompt: int, shared: int
    ) -> tuple[Prefix | None, float]:
        prefix = self._prefixes.get((namespace, 1, group)) if shared else None
        if shared and prefix is None:
            return None, 0.0  # nothing can hang below what is not there
        idle = self._resting.get((namespace, 0, conversation))
        own = 0.0 if idle is None else max(0.0, min(idle.tokens, prompt - shared - 1))
        return prefix, own

    def take(self, namespace: int, conversation: Hashable, group: Hashable, prompt: int, shared: int) -> Held:
        """Lock what is cached of the prompt. An idle tail that the prompt does not continue is freed."""
        prefix, own = self._find(namespace, conversation, group, prompt, shared)
        key = (namespace, 0, conversation)
        idle = self._resting.pop(key, None)
        if prefix is not None:
            self._use(prefix)
        if isinstance(idle, Idle):
            self.idle -= idle.tokens
            self._leave(idle.prefix)
        self.held += own
        found = prefix.tokens if prefix is not None else 0.0
        cached = min(int(found + own), prompt - 1)
        return Held(key, (namespace, 1, group), shared, prefix, own, cached)

    def _use(self, prefix: Prefix) -> None:
        if prefix.users == 0:
            self.idle -= prefix.tokens
            self.held += prefix.tokens
            if prefix.resting == 0:
                del self._resting[prefix.key]
        prefix.users += 1

    def _leave(self, prefix: Prefix | None) -> None:
        """One idle conversation fewer hangs below it."""
        if prefix is not None:
            prefix.resting -= 1
            self._rest(prefix, newest=False)

    def _rest(self, prefix: Prefix, *, newest: bool) -> None:
        """In the order of eviction exactly while nothing runs on it and nothing hangs below it."""
        if prefix.users == 0 and prefix.resting == 0:
            self._resting[prefix.key] = prefix
            self._resting.move_to_end(prefix.key, last=newest)

    def grow(self, tokens: float) -> None:
        self.held += tokens

    def allocate(self, held: Held, tokens: float) -> None:
        """Room for a prompt; the caller saw that free + idle suffices."""
        self.evict(tokens - self.free)
        held.own += tokens
        self.held += tokens

    def settle(self, held: Held) -> None:
        """The prompt is computed: its opening becomes the group's, unless a sibling was first."""
        if held.prefix is not None or held.shared == 0:
            return
        prefix = self._prefixes.get(held.group)
        held.own -= held.shared
        self.held -= held.shared
        if prefix is None:
            prefix = self._prefixes[held.group] = Prefix(held.group, float(held.shared))
            self.idle += held.shared
            self._resting[held.group] = prefix
        self._use(prefix)
        held.prefix = prefix

    def release(self, held: Held) -> None:
        """It runs no more; what it computed stays until evicted."""
        self.held -= held.own
        old = self._resting.pop(held.key, None)
        kept = held.own if held.prefix is not None or held.shared == 0 else 0.0  # an opening half computed is lost
        if isinstance(old, Idle):  # two requests of one conversation ran at once: the longer history stays
            self.idle -= old.tokens
            kept = max(kept, old.tokens)
            self._leave(old.prefix)
        if kept > 0:
            self._resting[held.key] = Idle(held.key, kept, held.prefix)
            self.idle += kept
        prefix = held.prefix
        if prefix is not None:
            prefix.resting += kept > 0
            prefix.users -= 1
            if prefix.users == 0:
                self.held -= prefix.tokens
                self.idle += prefix.tokens
                self._rest(prefix, newest=True)
        held.own = 0.0

    def evict(self, tokens: float) -> None:
        """Free at least `tokens` of idle entries, or all of them."""
        while tokens > 0 and self._resting:
            key, entry = next(iter(self._resting.items()))
            cut = min(entry.tokens, tokens) if isinstance(entry, Idle) else entry.tokens
            entry.tokens -= cut
            tokens -= cut
            self.idle -= cut
            self.evicted += cut
            if entry.tokens > 0:
                continue
            del self._resting[key]
            if isinstance(entry, Prefix):
                del self._prefixes[key]
            else:
                self._leave(entry.prefix)

    def audit(self, running: Iterable[Held]) -> float:
        """Used tokens, counted anew from every entry and from what runs (whose `own` must be up to date)."""
        used = sum(held.own for held in running) + sum(prefix.tokens for prefix in self._prefixes.values())
        return used + sum(entry.tokens for entry in self._resting.values() if isinstance(entry, Idle))
