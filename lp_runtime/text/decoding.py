"""A tokenizer's `decode`, and which part of a decoded text later tokens can still change."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import ModelError, first_line

REPLACEMENT = "\ufffd"  # what decoders emit for an incomplete character
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # spelling of single-byte tokens in vocabularies of text pieces
JOINING_TEXT = "a"  # after it, tokenizers no longer strip the spaces before it, and join it to an unfinished word
CLEANED_ENDS = " 'nvr"  # characters before the last one of what transformers' `clean_up_tokenization` replaces
CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


class Decoding:
    """Decodes token ids as `tokenizer.decode` does, and finds the part of a text that is final."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_bpe = type(getattr(backend, "model", None)).__name__ == "BPE" and not getattr(tokenizer, CLEANS_BPE, False)
        # transformers ignores the setting for BPE, and logs a warning at each first use.
        self._options = {"clean_up_tokenization_spaces": False} if is_bpe else {}
        self._options["skip_special_tokens"] = skip_special_tokens
        self._cleans_up = not is_bpe and bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        is_byte_level = type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"
        self._probes = [] if is_byte_level else _probes(tokenizer)
        self._byte_tokens = frozenset() if is_byte_level else _byte_tokens(tokenizer)
        # Whether another token never changes text before it, except incomplete characters at the end.
        self.only_appends = not (self._probes or self._cleans_up)

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; ModelError if the tokenizer cannot decode them."""
        if not token_ids:
            return ""
        try:
            text = self._tokenizer.decode(list(token_ids), **self._options)
            if not isinstance(text, str):
                raise TypeError(f"it returns a {type(text).__name__}")
        except Exception as error:  # tokenizers may be foreign code
            raise ModelError(f"the tokenizer cannot decode token ids: {first_line(error)}") from error
        return text

    def is_byte(self, token: int) -> bool:
        return token in self._byte_tokens

    def final_length(self, text: str, token_ids: Sequence[int]) -> int:
        """Return how many characters of the text of token ids no further token can change.

        U+FFFD at the end may begin a character, and cleaning up removes spaces before some texts. Decoding with further
        tokens finds the rest: decoders with byte tokens, for example, make a whole run of them U+FFFD if one does not
        fit.
        """
        num = len(text.rstrip(REPLACEMENT + CLEANED_ENDS if self._cleans_up else REPLACEMENT))
        for probe in self._probes:
            num = min(num, len(os.path.commonprefix([text, self([*token_ids, *probe])])))
        return num


@functools.lru_cache(maxsize=16)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens, which `decode` can skip."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token for token, each in added.items() if each.special)


@functools.lru_cache(maxsize=16)  # a Decoding is made for every request
def _probes(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return sequences of token ids that change the end of the text before them, if any token does."""
    if not hasattr(tokenizer, "get_vocab"):
        return []
    # 0xFF occurs in no UTF-8, so it makes any run of bytes invalid.
    probes = [[_byte_tokens(tokenizer)[-1]]] if _byte_tokens(tokenizer) else []
    for text in (JOINING_TEXT, *_replaced_ends(tokenizer)):
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        if ids and ids not in probes:
            probes.append(ids)
    return probes


@functools.lru_cache(maxsize=16)
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return [vocabulary[spelled] for spelled in sorted(filter(BYTE_TOKEN.fullmatch, vocabulary))]


def _replaced_ends(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the ends of texts that the tokenizer's decoder replaces, which may begin before a token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    patterns = [step["pattern"].get("String", "") for step in steps if step.get("type") == "Replace"]
    return [pattern[start:] for pattern in patterns for start in range(1, len(pattern))]
