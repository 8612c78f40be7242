"""The model's own tokenizer and chat template, used so that a conversation only ever grows.

The template is asked twice about a dummy conversation: how it opens, and what it puts between one reply and the next.
The dummy's messages are markers; what stands around them is the template's and may hold special tokens, what replaces
them is a task's or a command's and never may: a file that contains `<|user|>` is shown as those eight characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from agentrl.errors import UserError

_SYSTEM, _USER, _REPLY, _TOOL = "QSYSTEMQ7Q", "QUSERQ7Q", "QREPLYQ7Q", "QTOOLQ7Q"

Render = Callable[[Sequence[Mapping[str, Any]]], str]


class ChatTemplate:
    """Text to ids for one model. Construction checks the template; UserError says what it lacks."""

    def __init__(self, tokenizer: Tokenizer, render: Render, stop_ids: Sequence[int], *, where: str = "") -> None:
        self._where = where
        self._full = tokenizer
        self._plain = _without_added_tokens(tokenizer)
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self.stop_ids = tuple(stop_ids)
        dummy = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _REPLY},
            {"role": "tool", "content": _TOOL, "name": "shell", "tool_call_id": "call00000"},
        ]
        self._opening = [self._special(piece) for piece in self._split(render(dummy[:2]), (_SYSTEM, _USER))]
        _, after_reply = self._split(render(dummy), (_REPLY,))
        self._observation = [self._special(piece) for piece in self._split(after_reply, (_TOOL,))]
        if self._added.isdisjoint(self._observation[0]):
            raise UserError(f"{where}: the chat template puts no special token between a reply and a tool's answer")

    @classmethod
    def from_folder(cls, path: str | Path, *, tools: Sequence[Mapping[str, Any]] = ()) -> ChatTemplate:
        """Reads tokenizer.json, chat_template.jinja (or tokenizer_config.json) and generation_config.json.

        tools: JSON schemas for templates that describe tools to the model. Thinking is turned off where the template
        has a switch for it (`enable_thinking`).
        """
        folder = Path(path)
        config = _json(folder / "tokenizer_config.json")
        file = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_str(file.read_text())
        except OSError as exc:
            raise UserError(f"{file}: {exc.strerror}", hint="model.path must be a folder with tokenizer.json") from exc
        except Exception as exc:  # the library raises bare Exception for a malformed file
            raise UserError(f"{file}: not a tokenizer ({exc})", hint="fetch the model folder again") from exc
        source = _source(folder, config)
        specials = {key: _text(config[key]) for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
        render = _renderer(source, specials, tools, where=str(folder))
        stops = _stop_ids(folder, config, tokenizer)
        return cls(tokenizer, render, stops, where=str(folder))

    def opening(self, system: str, instruction: str) -> list[int]:
        """The first prompt, generation prompt included."""
        return self._fill(self._opening, (system, instruction))

    def observation(self, text: str, *, after: int) -> list[int]:
        """What follows a reply whose last token was `after`: a tool's answer and the next generation prompt.

        The model's own stop token opens what follows in most templates; it is not repeated.
        """
        ids = self._fill(self._observation, (text,))
        return ids[1:] if ids[0] == after and after in self.stop_ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply, its stop token removed; the other special tokens stay visible."""
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return str(self._full.decode(list(body), skip_special_tokens=False))

    def plain(self, text: str) -> list[int]:
        """Ids of a text that nobody vouches for: no special or added token, whatever it spells."""
        text = text.encode(errors="replace").decode()  # a lone surrogate is no text
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._added.isdisjoint(ids):
            return ids
        return [
            i for char in text for i in self._plain.encode(char, add_special_tokens=False).ids if i not in self._added
        ]

    def _fill(self, pieces: Sequence[Sequence[int]], values: Sequence[str]) -> list[int]:
        ids = list(pieces[0])
        for value, piece in zip(values, pieces[1:], strict=True):
            ids += [*self.plain(value), *piece]
        return ids

    def _special(self, text: str) -> list[int]:
        ids: list[int] = self._full.encode(text, add_special_tokens=False).ids
        return ids

    def _split(self, text: str, markers: Sequence[str]) -> list[str]:
        pieces = []
        for marker in markers:
            before, found, text = text.partition(marker)
            if not found or marker in text:
                role = {_SYSTEM: "system", _USER: "user", _REPLY: "assistant", _TOOL: "tool"}[marker]
                raise UserError(
                    f"{self._where}: the chat template does not show the {role} message exactly once",
                    hint="agentrl needs a template with system, user, assistant and tool roles",
                )
            pieces.append(before)
        return [*pieces, text]


def _renderer(source: str, specials: Mapping[str, str], tools: Sequence[Mapping[str, Any]], *, where: str) -> Render:
    """The template as Hugging Face's `apply_chat_template` would run it, in a sandbox: a model folder is a download."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    context = {**specials, "tools": list(tools) or None, "add_generation_prompt": True, "enable_thinking": False}

    try:
        template = environment.from_string(source)
    except TemplateError as exc:
        raise UserError(f"{where}: the chat template does not parse: {exc}") from exc

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return template.render(messages=messages, **context)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as exc:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"{where}: the chat template refuses a conversation of {roles}: {exc}",
                hint="agentrl needs a template with system, user, assistant and tool roles",
            ) from exc

    return render


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    spec = json.loads(tokenizer.to_str())
    spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(spec))


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise UserError(f"{path}: cannot be read as JSON ({exc})", hint="fetch the model folder again") from exc
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: not a JSON object", hint="fetch the model folder again")
    return loaded


def _source(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("tool_use") or named.get("default")
    if not isinstance(source, str):
        raise UserError(
            f"{folder}: no chat template", hint="model.path needs chat_template.jinja, or one in tokenizer_config.json"
        )
    return source


def _stop_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    listed = _json(folder / "generation_config.json").get("eos_token_id")
    if listed is None and config.get("eos_token"):
        listed = tokenizer.token_to_id(_text(config["eos_token"]))
    stops = [listed] if isinstance(listed, int) else listed
    if not stops:
        raise UserError(f"{folder}: no stop token", hint="generation_config.json must list eos_token_id")
    return [int(stop) for stop in stops]


def _text(token: Any) -> str:
    """Tokenizer configs write a token as a string or as an object with `content`."""
    return str(token["content"] if isinstance(token, Mapping) else token)
