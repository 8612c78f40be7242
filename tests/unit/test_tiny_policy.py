"""The policy that ships: its files fit together, any text survives its tokenizer, its template is GLM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import agentrl
from agentrl.rollout.actions import Run, Submit, parse
from agentrl.rollout.observation import SYSTEM
from agentrl.rollout.template import ChatTemplate
from agentrl.tasks.chores import KINDS, chore, demo
from agentrl.tasks.chores.words import NAMES

TINY = Path(agentrl.__file__).parent / "models" / "tiny"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
TEMPLATE = ChatTemplate.from_folder(TINY)
CALL = "<tool_call>shell\n<arg_key>command</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


def read(name: str) -> Any:
    return json.loads((TINY / name).read_text())


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def text(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


# --- tokenizer --------------------------------------------------------------------------------------------------------


@given(st.text())
def test_any_text_round_trips(anything: str) -> None:
    assert text(ids(anything)) == anything


@given(st.lists(st.sampled_from([*NAMES, " ", "\n", ".txt", "<tool_call>", "</arg_value>\n", "<|user|>", "é"])))
def test_known_words_round_trip_in_any_order(pieces: list[str]) -> None:
    assert text(ids("".join(pieces))) == "".join(pieces)


def test_every_name_is_one_token_with_and_without_a_space() -> None:
    assert all(len(ids(form)) == 1 for name in NAMES for form in (name, f" {name}"))


def test_the_frames_of_a_turn_are_few_tokens() -> None:
    assert len(ids(CALL.format("ls") + "<|observation|>")) == 4
    assert len(ids("\n<tool_response>\n\n</tool_response><|assistant|>\n<think></think>\n")) == 3


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_chores_are_about_one_token_a_word(kind: str) -> None:
    for seed in range(10):
        for said in (chore(kind, seed).instruction, *demo(kind, seed)):
            assert len(ids(said)) <= 1 + 2.5 * len(said.split()), said


def test_the_vocabulary_is_the_models() -> None:
    assert TOKENIZER.get_vocab_size() <= read("config.json")["vocab_size"]
    stops = read("generation_config.json")["eos_token_id"]
    assert stops == read("config.json")["eos_token_id"] == list(TEMPLATE.stop_ids)
    assert [TOKENIZER.id_to_token(stop) for stop in stops] == ["<|endoftext|>", "<|user|>", "<|observation|>"]


# --- chat template ----------------------------------------------------------------------------------------------------

OPENING = "[gMASK]<sop><|system|>\n{}<|user|>\nDo it.<|assistant|>\n<think></think>\n"


def test_the_opening() -> None:
    assert text(TEMPLATE.opening(SYSTEM, "Do it.")) == OPENING.format(SYSTEM)


def test_an_observation() -> None:
    reply = ids(CALL.format("ls") + "<|observation|>")
    after = TEMPLATE.observation("plum.txt", after=reply[-1])
    assert text(after) == "\n<tool_response>\nplum.txt\n</tool_response><|assistant|>\n<think></think>\n"


def test_replies_are_read_as_they_were_taught() -> None:
    assert parse(TEMPLATE.decode(ids(CALL.format("echo a\nb") + "<|observation|>"))) == Run(command="echo a\nb")
    assert parse(TEMPLATE.decode(ids("done<|user|>"))) == Submit(answer="done")


def test_transformers_renders_a_whole_conversation_as_the_turns_make_it() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    call = {"type": "function", "function": {"name": "shell", "arguments": {"command": "ls -S"}}}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "plum.txt"},
        {"role": "assistant", "content": "done"},
    ]
    reply, final = ids(CALL.format("ls -S") + "<|observation|>"), ids("done")
    turns = [*TEMPLATE.opening(SYSTEM, "Do it."), *reply, *TEMPLATE.observation("plum.txt", after=reply[-1]), *final]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text(turns)
    assert list(tokenizer.apply_chat_template(messages, return_dict=False)) == turns


# --- model ------------------------------------------------------------------------------------------------------------


def test_the_weights_are_small_and_load_in_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert (TINY / "model.safetensors").stat().st_size <= 8 << 20
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "Glm4MoeForCausalLM"
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    prompt = torch.tensor([TEMPLATE.opening(SYSTEM, "Delete the largest file.")])
    with torch.no_grad():
        logits = model(prompt).logits
    assert logits.shape == (1, prompt.shape[1], read("config.json")["vocab_size"])
    assert bool(torch.isfinite(logits).all())
    likely = [TOKENIZER.id_to_token(token) for token in logits[0, -1].topk(2).indices.tolist()]
    assert set(likely) == {CALL.split("{}")[0], "done"}, "it acts, or thinks that it is done"
