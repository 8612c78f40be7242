"""The words chores are made of. Short, common, none a shell command: a tokenizer can hold each as one token."""

from __future__ import annotations

_WORDS = """
apple bear bird boat bread cake chair clock cloud coin crab crow deer desk door drum
fig fish flag fox frog goat grape hat hill horn house king kite lake lamp leaf
lemon lion map milk moon moss nest owl peach pear plum pond rose ship star tree
"""
NAMES = tuple(_WORDS.split())
