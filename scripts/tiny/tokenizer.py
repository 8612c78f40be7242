"""A byte-level tokenizer with whole words: any text round-trips, a chore's text is about one token a word.

There are no merges. A piece of text that is an entry of the vocabulary is one token, anything else falls to its bytes.
GLM's markers are single tokens, and so are the fixed runs of them that frame a command and its result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
CALL_BEGIN = "<tool_call>shell\n<arg_key>command</arg_key>\n<arg_value>"
CALL_END = "</arg_value>\n</tool_call>"
FRAMES = [
    "<|assistant|>\n<think></think>\n",
    CALL_BEGIN,
    CALL_END,
    "\n<tool_response>\n",
    "\n</tool_response>",
]
STOPS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
PIECES = r"\.[a-z]+| ?[A-Za-z]+| ?-[A-Za-z]+| ?\d| ?>>| ?[^\sA-Za-z0-9]|\s"


def build(texts: Iterable[str], words: Iterable[str], size: int) -> Tokenizer:
    """All bytes, `words` with and without a space before, the commonest pieces of `texts`, then GLM's markers."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary += [form for word in words for form in (word, f"Ġ{word}")]
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    room = size - len(vocabulary) - len(CONTROL + MARKERS + FRAMES)
    known = set(vocabulary)
    common = sorted((-count, piece) for piece, count in counts.items() if piece not in known)
    vocabulary += [piece for _, piece in common[:room]]
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS + FRAMES])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": CONTROL[1:],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
