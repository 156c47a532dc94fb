"""Conversion of prompts and conversations to token ids. The way back is in lp_runtime/text."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import ConfigError, RequestError, first_line
from lp_runtime.utils.time_limit import time_limit

TEMPLATE_SECONDS = 5.0  # that a chat template may take: templates come with models, and may loop for hours
RENDERED = "the conversation with its tools, as the chat template shows it,"  # of errors
BREAK = "\ufdd0"  # inserted into text that only looks like a special token; a Unicode noncharacter, so never real text

RENDERING = ("add_generation_prompt", "continue_final_message")  # arguments of `apply_chat_template` for callers
# Its other arguments that are no variables of a template: a client must not bring its own template.
ARGUMENTS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents", *RENDERING}

# Tokens of fill-in-the-middle before the prefix, before the suffix, and before the middle, by model family.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX
)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    add_special_tokens: bool = True,
    split_special_tokens: bool = False,
    what: str = "the prompt",  # of the error's line
) -> list[int]:
    """Return the token ids of a text; RequestError if it is not encodable Unicode (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid Unicode at character {error.start}: {error.reason}") from error
    options = {"split_special_tokens": True} if split_special_tokens else {}
    return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, **options).input_ids


def encode_infilling(
    tokenizer: PreTrainedTokenizerBase, prefix: str, suffix: str, splits_special: bool, adds_special: bool = True
) -> list[int]:
    """Return the token ids of a prompt whose continuation is the text between a prefix and a suffix.

    Raises RequestError if the model has no tokens for that. With `splits_special`, special tokens spelled out in the
    texts are encoded as plain text. `adds_special`: whether the tokenizer may add some before the prefix.
    """
    vocabulary = tokenizer.get_vocab()
    marks = next((marks for marks in MARKS if all(mark in vocabulary for mark in marks)), None)
    if marks is None:
        raise RequestError("suffix: the model's tokenizer has no tokens for fill-in-the-middle; leave it out")
    before, between, after = cast(list[int], tokenizer.convert_tokens_to_ids(list(marks)))
    begin = encode(tokenizer, prefix, adds_special, splits_special)
    inner = encode(tokenizer, prefix, add_special_tokens=False, split_special_tokens=splits_special)
    bos = begin[: len(begin) - len(inner)] if begin[len(begin) - len(inner) :] == inner else []
    end = encode(tokenizer, suffix, False, splits_special, "the suffix")
    return [*bos, before, *inner, between, *end, after]


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest that names a tokenizer: equal ones encode text equally."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), backend and backend.to_str())
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    # Each with "role" and "content"; "developer" becomes "system" if the template does not know that role.
    messages: Sequence[Mapping[str, Any]],
    # Whether special tokens spelled out in the messages are encoded as plain text; those of the template always stay
    # special.
    split_special_tokens: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),  # functions that the model may call, each in the OpenAI API's format
    # Variables of the chat template, such as `enable_thinking`, and transformers' `add_generation_prompt` (default
    # true) and `continue_final_message`.
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation, rendered by the chat template up to the model's next answer.

    Raises RequestError if the model has no chat template, or the template rejects the messages or takes longer than
    TEMPLATE_SECONDS.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages: the model has no chat template; give a prompt instead")
    options: dict[str, Any] = {"add_generation_prompt": True, **(template_kwargs or {})}
    check_variables(options.keys() - RENDERING)
    try:
        specials = special_tokens(tokenizer) if split_special_tokens else ()
        known = _with_known_roles(messages, chat_template(tokenizer))
        conversation = cast(list[dict[str, str]], [_with_breaks(message, specials) for message in known])
        shown = cast(list[dict | Callable], [dict(tool) for tool in tools]) or None
        with time_limit(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(conversation, tools=shown, tokenize=False, **options)
    except TimeoutError as error:
        raise RequestError(f"messages: the model's chat template takes longer than {TEMPLATE_SECONDS:g} s") from error
    except Exception as error:  # templates are programs and may raise anything
        raise RequestError(f"messages: the model's chat template refuses them: {first_line(error)}") from error
    if BREAK not in text:
        return encode(tokenizer, cast(str, text), False, what=RENDERED)  # the template has already added special tokens
    return _encode_with_breaks(tokenizer, cast(str, text), specials)


def _encode_with_breaks(tokenizer: PreTrainedTokenizerBase, text: str, specials: Sequence[str]) -> list[int]:
    """Return the token ids of rendered messages, in which BREAK marks what only looks like a special token."""
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, specials))})", text):
        if piece in specials:
            ids.append(cast(int, tokenizer.convert_tokens_to_ids(piece)))
        elif piece:
            plain = piece.replace(BREAK, "")
            ids += encode(tokenizer, plain, False, True, RENDERED)
    return ids


def check_variables(names: Iterable[str], error: type[RequestError | ConfigError] = RequestError) -> None:
    """Raise an error if any name of `chat_template_kwargs` is an argument of `apply_chat_template`, not a variable."""
    for name in sorted(names):
        remedy = "; give the request's field of this name" if name in RENDERING else ""
        if remedy or name in ARGUMENTS:
            raise error(f"chat_template_kwargs: {name!r} is no variable of the chat template{remedy}")


def _with_known_roles(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """Return messages with OpenAI's role "developer" renamed to "system" if the template lacks it."""
    if "developer" in template:
        return messages
    return [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def unknown_variables(tokenizer: PreTrainedTokenizerBase, names: Iterable[str]) -> list[str]:
    template = chat_template(tokenizer)
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]


def conversation(turns: Sequence[str], answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return a user's `turns` and the `answers` to the first of them as messages, up to the next turn."""
    said = [{"role": "user", "content": text} for text in turns[: len(answers) + 1]]
    answered = [{"role": "assistant", "content": text} for text in answers]
    return [message for pair in zip(said, answered, strict=False) for message in pair] + said[len(answers) :]


def check_chat_template(tokenizer: PreTrainedTokenizerBase, location: str) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"chat=true: the model {location} has no chat template")


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of a tokenizer's special tokens, longest first."""
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(specials, key=len, reverse=True)


def _with_breaks(value: Any, specials: Sequence[str]) -> Any:
    """Return a message, or a part of one, with BREAK inserted into each special token spelled out in it."""
    if isinstance(value, Mapping):
        return {key: _with_breaks(each, specials) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_breaks(each, specials) for each in value]
    if isinstance(value, str) and specials:
        value = value.replace(BREAK, "")
        for special in specials:
            value = value.replace(special, special[:1] + BREAK + special[1:])
    return value
