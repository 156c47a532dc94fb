"""Prompts of fill-in-the-middle: text between a prefix and a suffix."""

from __future__ import annotations

from typing import cast

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import RequestError
from lp_runtime.model.tokenizer import encode

# Tokens before the prefix, before the suffix, and before the middle, by model family.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX
)


def encode_infilling(tokenizer: PreTrainedTokenizerBase, prefix: str, suffix: str, splits_special: bool) -> list[int]:
    """Return the token ids of a prompt whose continuation is the text between a prefix and a suffix.

    Args:
        splits_special: whether special tokens spelled out in the texts are encoded as plain text.

    Raises:
        RequestError: the model has no tokens for it.
    """
    vocabulary = tokenizer.get_vocab()
    marks = next((marks for marks in MARKS if all(mark in vocabulary for mark in marks)), None)
    if marks is None:
        raise RequestError("suffix: the model's tokenizer has no tokens for fill-in-the-middle; leave it out")
    before, between, after = cast(list[int], tokenizer.convert_tokens_to_ids(list(marks)))
    begin = encode(tokenizer, prefix, split_special_tokens=splits_special)
    inner = encode(tokenizer, prefix, add_special_tokens=False, split_special_tokens=splits_special)
    bos = begin[: len(begin) - len(inner)] if begin[len(begin) - len(inner) :] == inner else []
    end = encode(tokenizer, suffix, add_special_tokens=False, split_special_tokens=splits_special)
    return [*bos, before, *inner, between, *end, after]
