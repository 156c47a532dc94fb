"""lp-chat url=...: answers of any server that speaks the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lp_runtime.config.commands import ChatConfig
from lp_runtime.entrypoints.chat import Messages, converse, interruptible
from lp_runtime.utils.openai_client import Endpoint


def chat_with_server(config: ChatConfig) -> None:
    """Hold a conversation with the server of the settings.

    Raises:
        ConfigError: the URL is none, or the key's file cannot be read.
        LaunchError: the server cannot be reached.
        RequestError: the server refuses to say what models it has.
    """
    assert config.url is not None
    endpoint = Endpoint.of(config.url, config.api_key, config.api_key_file)
    name = config.served_name or endpoint.model()
    converse(config.system, partial(_answer, endpoint, {"model": name, **_fields(config)}))


def _fields(config: ChatConfig) -> dict[str, object]:
    """Return the fields of a request that the settings stand for; those that are not given are the server's choice."""
    limits = {"max_tokens": config.max_new_tokens, "stop": config.stop, "max_time": config.max_time}
    fields = limits | vars(config.sampling)
    return {name: value for name, value in fields.items() if value is not None}


def _answer(endpoint: Endpoint, fields: dict[str, object], messages: Messages) -> str:
    """Stream an answer; return the text that was shown."""
    shown: list[str] = []
    try:
        with interruptible() as interrupted:
            for text in _texts(endpoint, {**fields, "messages": messages}):
                shown.append(text)
                print(text, end="", flush=True)
                if interrupted.is_set():
                    break
    finally:
        if shown:
            print(flush=True)
    return "".join(shown)


def _texts(endpoint: Endpoint, body: dict[str, object]) -> Iterator[str]:
    """Yield the pieces of an answer's text."""
    for event in endpoint.stream("chat/completions", body):
        for choice in event.get("choices") or ():
            if text := (choice.get("delta") or {}).get("content"):
                yield text
