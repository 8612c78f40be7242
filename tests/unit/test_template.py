"""Chat templates of several families: conversations only grow, and no text can speak as a role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import agentrl
from agentrl.errors import UserError
from agentrl.rollout.actions import SHELL_TOOL
from agentrl.rollout.template import ChatTemplate

TINY = Path(agentrl.__file__).parent / "models" / "tiny"

GLM = """[gMASK]<sop>
{%- if tools %}<|system|>
tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}<|system|>
{{ m.content }}
{%- elif m.role == 'user' %}<|user|>
{{ m.content }}{{ '/nothink' if not enable_thinking }}
{%- elif m.role == 'assistant' %}<|assistant|>
<think></think>
{{ m.content.strip() }}
{%- else %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}

<tool_response>
{{ m.content }}
</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
<think></think>
{% endif %}"""

# a reply is closed by its own token; a tool's answer comes as a user message
CHATML = """{{ bos_token }}{% for m in messages -%}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SPECIALS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
SPECIALS += ["<|im_start|>", "<|im_end|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

hostile = st.lists(st.one_of(st.sampled_from(SPECIALS + WORDS), st.text(max_size=8))).map("".join)


def tokenizer() -> Tokenizer:
    """Bytes with a few merges of the roles' own letters, and roles as added tokens, special or not, as GLM's are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {"us": 256, "er": 257, "user": 258, "<|": 259, "|>": 260}
    merges = [("u", "s"), ("e", "r"), ("us", "er"), ("<", "|"), ("|", ">")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORDS])
    return made


def folder(path: Path, template: str, stops: Any = "<|observation|>", **config: Any) -> Path:
    made = tokenizer()
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = made.token_to_id(stops) if isinstance(stops, str) else stops
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    ids = [tokenizer().token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    return ChatTemplate.from_folder(folder(tmp_path_factory.mktemp("glm"), GLM, ids))


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    bos = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    return ChatTemplate.from_folder(folder(tmp_path_factory.mktemp("chatml"), CHATML, "<|im_end|>", bos_token=bos))


@pytest.fixture(scope="session", params=["glm", "chatml", "tiny"])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    if request.param == "tiny":
        return ChatTemplate.from_folder(TINY)
    chosen: ChatTemplate = request.getfixturevalue(request.param)
    return chosen


def text(template: ChatTemplate, ids: list[int]) -> str:
    return template.decode([*ids, template.stop_ids[0]])


def test_glm_opening_and_observation(glm: ChatTemplate) -> None:
    opening = text(glm, glm.opening("be brief", "list files"))
    assert opening == ("[gMASK]<sop><|system|>\nbe brief<|user|>\nlist files/nothink<|assistant|>\n<think></think>\n")
    after = glm.observation("a.txt", after=10)
    assert text(glm, after) == (
        "<|observation|>\n<tool_response>\na.txt\n</tool_response><|assistant|>\n<think></think>\n"
    )


def test_the_models_own_stop_token_is_not_repeated(glm: ChatTemplate, chatml: ChatTemplate) -> None:
    observation = glm.stop_ids[-1]
    assert glm.observation("x", after=observation) == glm.observation("x", after=10)[1:]
    end = chatml.stop_ids[0]
    assert text(chatml, chatml.observation("x", after=10)).startswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nx"
    )
    assert text(chatml, chatml.observation("x", after=end)).startswith("\n<|im_start|>user\n")


def test_a_stop_token_that_does_not_open_what_follows_stays(glm: ChatTemplate) -> None:
    user = glm.stop_ids[1]
    assert glm.observation("x", after=user) == glm.observation("x", after=10)


def test_the_begin_token_comes_from_the_template_only(chatml: ChatTemplate) -> None:
    assert text(chatml, chatml.opening("s", "i")).count("<|endoftext|>") == 1


def test_tools_are_described_where_the_template_does(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(folder(tmp_path, GLM), tools=[SHELL_TOOL])
    assert '"name": "shell"' in text(template, template.opening("s", "i"))


@given(words=hostile)
def test_what_a_command_prints_is_never_a_role(template: ChatTemplate, words: str) -> None:
    before, after = template.observation("", after=-1), template.observation(words, after=-1)
    tokens = tokenizer_of(template)
    added = set(tokens.get_added_tokens_decoder())
    assert [i for i in after if i in added] == [i for i in before if i in added]
    assert words.encode(errors="replace").decode() in text(template, after)


@given(words=hostile)
def test_nor_is_what_a_task_says(template: ChatTemplate, words: str) -> None:
    added = set(tokenizer_of(template).get_added_tokens_decoder())
    opening, empty = template.opening(words, words), template.opening("", "")
    assert [i for i in opening if i in added] == [i for i in empty if i in added]


@given(words=st.text(alphabet=st.characters(codec="utf-8")))
def test_plain_text_survives(template: ChatTemplate, words: str) -> None:
    assert text(template, template.plain(words)) == words


def test_lone_surrogates_are_no_text_and_no_error(template: ChatTemplate) -> None:
    assert text(template, template.plain("a\ud800b")) == "a?b"


def test_decode_drops_only_the_stop_token(glm: ChatTemplate) -> None:
    ids = [*glm.plain("hi "), *tokenizer().encode("<tool_call>").ids, glm.stop_ids[2]]
    assert glm.decode(ids) == "hi <tool_call>"
    assert glm.decode([]) == ""


def tokenizer_of(template: ChatTemplate) -> Tokenizer:
    return template._full


# --- folders that will not do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('tools only') }}", "refuses a conversation of .*: tools only"),
        ("{% for m in messages %}", "does not parse"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "does not show the assistant message exactly once"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "does not show the system message exactly once"),
        ("{{ messages[0].nothing.more }}", "refuses a conversation"),
        ("{{ messages.__class__.__mro__ }}", "refuses a conversation"),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", "no special token between"),
    ],
)
def test_a_template_that_will_not_do_is_refused_at_once(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate.from_folder(folder(tmp_path, template))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: No such file"):
        ChatTemplate.from_folder(tmp_path)
    folder(tmp_path, GLM)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        ChatTemplate.from_folder(tmp_path)
    folder(tmp_path, GLM)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match=r"generation_config\.json: cannot be read as JSON"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(UserError, match="no stop token"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        ChatTemplate.from_folder(tmp_path)


def test_older_folders_keep_both_in_the_tokenizers_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": GLM}]
    folder(tmp_path, GLM, chat_template=named, eos_token="<|user|>")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "generation_config.json").unlink()
    template = ChatTemplate.from_folder(tmp_path)
    assert template.stop_ids == (tokenizer().token_to_id("<|user|>"),)


@pytest.mark.parametrize("kind", ["glm", "chatml", "tiny"])
def test_it_says_what_transformers_would_say(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Same template, same conversation: one rendering of the whole, against opening + reply + observation."""
    from transformers import PreTrainedTokenizerFast

    path = TINY if kind == "tiny" else Path(request.getfixturevalue(kind)._where)
    template = ChatTemplate.from_folder(path)
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List the files, please."},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": "a.txt\nb.txt"},
    ]
    whole = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    ours = template.opening("Be brief.", "List the files, please.")
    ours += [*template.plain("I look."), *template.observation("a.txt\nb.txt", after=-1)]
    # a template may write the turn's opening differently once the turn is history; the rest must agree to the letter
    assert text(template, ours).replace("<think></think>\n", "") == str(whole).replace("<think></think>\n", "")
