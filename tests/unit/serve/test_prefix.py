"""The prefix cache never leaks a block, never gives one to two owners, and only ever matches what was put in."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from agentrl.serve.embedded.prefix import PrefixCache

SIZE = 2
tokens = st.lists(st.integers(0, 2), max_size=14)  # few values: prefixes meet often
namespaces = st.sampled_from(["0", "1"])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), namespaces, tokens),
        st.tuples(st.just("match"), namespaces, tokens),
        st.tuples(st.just("shrink"), st.integers(-1, 9), st.just(())),
        st.tuples(st.just("clear"), st.just(""), st.just(())),
    ),
    max_size=40,
)


def check(cache: PrefixCache) -> None:
    held = [node.block for node in cache._recency]
    assert sorted(held + cache._free) == list(range(cache.blocks))
    assert len(held) == cache.used <= cache.limit
    reached = []
    roots = list(cache._root.children.values())
    assert all(root.children for root in roots), "a namespace without blocks is forgotten"
    while roots:
        node = roots.pop()
        reached += [child.block for child in node.children.values()]
        roots += node.children.values()
    assert sorted(reached) == sorted(held)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 8), actions)
def test_blocks_are_conserved_and_hold_what_was_put_in(blocks: int, script: list[tuple[str, object, object]]) -> None:
    cache = PrefixCache(blocks, SIZE)
    stored: dict[int, tuple[object, tuple[int, ...]]] = {}  # what the pool would hold: block -> the prefix it ends
    for action, first, second in script:
        if action == "insert":
            assert isinstance(first, str)
            assert isinstance(second, list)
            fresh = cache.insert(first, second)
            assert [index for _, index in fresh] == list(
                range(fresh[0][1] if fresh else 0, (fresh[-1][1] + 1) if fresh else 0)
            ), "new blocks are neighbours"
            for block, index in fresh:
                stored[block] = (first, tuple(second[: (index + 1) * SIZE]))
        elif action == "match":
            assert isinstance(first, str)
            assert isinstance(second, list)
            for index, block in enumerate(cache.match(first, second)):
                assert stored[block] == (first, tuple(second[: (index + 1) * SIZE]))
        elif action == "shrink":
            assert isinstance(first, int)
            cache.shrink(first)
        else:
            cache.clear()
        check(cache)


@settings(deadline=None)
@given(tokens)
def test_what_fits_is_found_again(sequence: list[int]) -> None:
    cache = PrefixCache(8, SIZE)
    cache.insert("0", sequence)
    assert len(cache.match("0", sequence)) == len(sequence) // SIZE
    assert cache.match("1", sequence) == []


def test_the_least_recent_prefix_goes_first() -> None:
    cache = PrefixCache(4, SIZE)
    cache.insert("0", [1, 1, 2, 2])
    cache.insert("0", [3, 3, 4, 4])
    cache.match("0", [1, 1, 2, 2])
    cache.insert("0", [5, 5])
    assert len(cache.match("0", [1, 1, 2, 2])) == 2
    assert len(cache.match("0", [3, 3, 4, 4])) == 1  # its end went, its beginning did not
