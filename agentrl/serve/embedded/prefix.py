"""The prefix cache's book-keeping: which blocks of tokens are held, in whose name, and which goes first.

Pure: no torch, no clock. A tree of blocks of `block_tokens` tokens for each namespace (the `extra_key` of a request, so
that no request ever matches what other weights computed). Running requests work on copies of their own, so a block may
be evicted at any time: there are no pins and nothing to leak.

Invariant: every block is free or belongs to exactly one node, and a node is always more recent than its children (a
touch goes from the leaf up), so the least recent node is always a leaf and may be evicted as it stands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class _Node:
    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, parent: _Node | None, key: tuple[int, ...] | str, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[tuple[int, ...] | str, _Node] = {}


class PrefixCache:
    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.limit = blocks  # may be lowered for a while (`shrink`) so that running requests have their share
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._root = _Node(None, "", -1)
        self._recency: OrderedDict[_Node, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks held."""
        return len(self._recency)

    def match(self, namespace: str, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest held prefix of `tokens`, in order; they become the most recent."""
        path = self._walk(namespace, tokens)
        self._touch(path)
        return [node.block for node in path]

    def insert(self, namespace: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Hold every whole block of `tokens`; returns (block, index) of those that are new and must be filled.

        Older leaves are evicted where there is no room; the end of `tokens` is left out where even that gives none.
        """
        path = self._walk(namespace, tokens)
        self._touch(path)
        node = path[-1] if path else self._root.children.get(namespace)
        if node is None:
            node = self._root.children[namespace] = _Node(self._root, namespace, -1)
        size = self.block_tokens
        fresh: list[tuple[int, int]] = []
        for index in range(len(path), len(tokens) // size):
            if self.used >= self.limit:
                if self.used == len(path):  # all that is left is this very prefix
                    break
                self._evict_one(keep=node)
            key = tuple(tokens[index * size : (index + 1) * size])
            node.children[key] = child = _Node(node, key, self._free.pop())
            self._recency[child] = None
            path.append(child)
            fresh.append((child.block, index))
            node = child
        self._touch(path)
        self._drop_empty(node)
        return fresh

    def shrink(self, limit: int) -> None:
        """Hold at most `limit` blocks from now on."""
        self.limit = max(0, min(limit, self.blocks))
        while self.used > self.limit:
            self._evict_one(keep=None)

    def clear(self) -> None:
        self._root.children.clear()
        self._recency.clear()
        self._free = list(range(self.blocks - 1, -1, -1))

    def _walk(self, namespace: str, tokens: Sequence[int]) -> list[_Node]:
        node = self._root.children.get(namespace)
        path: list[_Node] = []
        size = self.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            if node is None:
                break
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is not None:
                path.append(node)
        return path

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._recency.move_to_end(node)

    def _evict_one(self, keep: _Node | None) -> None:
        """Free the least recent block. keep: a namespace's root that is about to be used, however empty it gets."""
        node, _ = self._recency.popitem(last=False)
        self._free.append(node.block)
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent is not keep:
            self._drop_empty(parent)

    def _drop_empty(self, node: _Node) -> None:
        if node.parent is self._root and not node.children:
            del self._root.children[node.key]
