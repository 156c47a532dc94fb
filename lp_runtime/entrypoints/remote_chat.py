"""lp-chat url=...: a conversation with any OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from lp_runtime.config.commands import ChatConfig
from lp_runtime.entrypoints.chat import Messages, converse, show_answer, show_cut
from lp_runtime.errors import ConfigError
from lp_runtime.utils.openai_client import REASONING_FIELDS, Endpoint, choices_of, delta_of

FIELD_OF = {"min_new_tokens": "min_tokens"}  # field names of the API (vLLM's and ours) that differ from setting names
NOT_OF_THE_API: dict[str, object] = {"typical_p": 1, "no_repeat_ngram_size": 0, "bad_words_ids": []}
"""Sampling settings for which the API has no field, and the value of each that is off."""


def chat_with_server(config: ChatConfig) -> None:
    assert config.url is not None
    fields = _fields(config)
    endpoint = Endpoint.of(config.url, config.api_key, config.api_key_file)
    name = config.served_name or endpoint.model()
    converse(config.system, partial(_answer, endpoint, config, {"model": name, **fields}))


def _fields(config: ChatConfig) -> dict[str, object]:
    """Return the request fields for the given settings; raise ConfigError if a setting has no field."""
    sampling = dict(vars(config.sampling))
    for name, off in NOT_OF_THE_API.items():
        if (value := sampling.pop(name)) not in (None, off):
            raise ConfigError(f"sampling.{name}={value}: not with url, as the API has no field for it")
    limits = {"max_tokens": config.max_new_tokens, "stop": config.stop, "max_time": config.max_time}
    fields = limits | {FIELD_OF.get(name, name): value for name, value in sampling.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _answer(endpoint: Endpoint, config: ChatConfig, fields: dict[str, object], messages: Messages) -> str:
    reasons = list[object]()
    shown = show_answer(_texts(endpoint, {**fields, "messages": messages}, reasons))
    if "length" in reasons:
        show_cut(config)
    return shown


def _texts(endpoint: Endpoint, body: dict[str, object], reasons: list[object]) -> Iterator[tuple[str, str]]:
    """Stream an answer as pairs (piece of reasoning, piece of text), either may be empty; collect finish reasons."""
    for event in endpoint.stream("chat/completions", body):
        for choice in choices_of(event):
            reasons.append(choice.get("finish_reason"))
            delta = delta_of(choice)
            reasoning = next((text for name in REASONING_FIELDS if (text := _text(delta, name))), "")
            yield reasoning, _text(delta, "content")


def _text(delta: dict[str, Any], name: str) -> str:
    text = delta.get(name)
    return text if isinstance(text, str) else ""
