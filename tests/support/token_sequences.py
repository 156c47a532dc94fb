"""Random prompts and new tokens of a tokenizer, and steps that commit them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from support.tokenizer_kinds import BYTE_PIECES, BYTES, CORPUS

CHARACTERS = [*" aé北🙂ß\n.,'’▁\ufffd\u0301\u200d😀", "👩‍👩‍👧"]  # of texts in tokens of single bytes
LENGTHS = (1, 2, 4, 8, 16)  # of the parts of a sequence
LONG = 80  # tokens of some parts: more than an incremental detokenizer decodes again in a step


def cut(ids: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Return ids in steps of random sizes, some of them empty."""
    steps, start, largest = [], 0, rng.choice([1, 2, 5, 12])
    while start < len(ids):
        size = rng.randint(0 if rng.random() < 0.1 else 1, largest)
        steps.append(list(ids[start : start + size]))
        start += size
    return steps


def ids_of_bytes(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token of each byte; empty if the vocabulary has no such tokens."""
    vocabulary = tokenizer.get_vocab()
    for pieces in (BYTE_PIECES, [BYTES[byte] for byte in range(256)], [chr(byte) for byte in range(256)]):
        if all(piece in vocabulary for piece in pieces):
            return [vocabulary[piece] for piece in pieces]
    return []


class RandomTokens:
    """Random tokens: texts, bytes, special tokens, and tokens that make no text.

    Args:
        rng: source of randomness.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rng: random.Random):
        self._tokenizer = tokenizer
        self._rng = rng
        self._all = list(range(len(tokenizer)))
        pieces = tokenizer.convert_ids_to_tokens(self._all)
        self._short = [i for i in self._all if len(pieces[i].strip("▁Ġ#@")) < 2 and not pieces[i].isalnum()]
        self._special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self._bytes = ids_of_bytes(tokenizer)
        # Models may have more token ids than their tokenizers; transformers decodes such ids to nothing.
        self._any = [*self._all, *range(len(tokenizer), len(tokenizer) + 4)] if tokenizer.is_fast else self._all
        self._styles = [self._uniform, self._text, self._text, self._few, self._punctuation]
        self._styles += [self._with_special] if self._special else []
        self._styles += [self._byte_text, self._byte_text, self._any_bytes] if self._bytes else []

    def tokens(self) -> list[int]:
        """Return parts of different styles: at most about 60 tokens, rarely a few hundred."""
        lengths = [
            LONG if self._rng.random() < 0.02 else self._rng.choice(LENGTHS) for _ in range(self._rng.randint(1, 4))
        ]
        return [token for length in lengths for token in self._rng.choice(self._styles)(length)]

    def prompt(self) -> list[int]:
        """Return no token, BOS only, the tokens of a text, or any tokens, which may end within a character."""
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        kind = self._rng.randrange(6)
        if kind == 0:
            return []
        if kind == 1:
            return bos
        if kind == 2:
            return self._tokenizer.encode(self._excerpt())
        return (bos if self._rng.random() < 0.5 else []) + self.tokens()

    def text(self) -> list[int]:
        """Return the tokens of a part of the corpus, without special tokens."""
        return self._tokenizer.encode(self._excerpt(), add_special_tokens=False)

    def _excerpt(self) -> str:
        start = self._rng.randrange(len(CORPUS))
        return CORPUS[start : start + self._rng.randint(1, 40)]

    def _text(self, length: int) -> list[int]:
        return self.text()[:length]

    def _uniform(self, length: int) -> list[int]:
        return self._rng.choices(self._any, k=length)

    def _few(self, length: int) -> list[int]:
        """Return few different tokens, over and over."""
        return self._rng.choices(self._rng.choices([*self._all, *self._short], k=3), k=length)

    def _punctuation(self, length: int) -> list[int]:
        return self._rng.choices(self._short, k=length)

    def _with_special(self, length: int) -> list[int]:
        tokens = self._rng.choice([self._uniform, self._byte_text if self._bytes else self._text])(length)
        for _ in range(self._rng.randint(1, 3)):
            tokens.insert(self._rng.randint(0, len(tokens)), self._rng.choice(self._special))
        return tokens

    def _byte_text(self, length: int) -> list[int]:
        """Return tokens of single bytes that spell characters; the last one may be incomplete."""
        text = "".join(self._rng.choices(CHARACTERS, k=length)).encode()
        return [self._bytes[byte] for byte in text[: self._rng.choice([length, len(text)])]]

    def _any_bytes(self, length: int) -> list[int]:
        return self._rng.choices(self._bytes, k=length)
