"""Text and bytes of single tokens, for constraints and log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lp_runtime.errors import ModelError
from lp_runtime.text.decoding import BYTE_TOKEN, REPLACEMENT, Decoding, special_ids
from lp_runtime.text.detokenizer import Detokenizer

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # for byte-level vocabularies (GPT-2)
ANCHORS = ("a", "A", "1", "x", "the")  # texts whose last token may be the anchor: see TokenTexts
NUM_CHECKED_PAIRS = 200


class TokenTexts:
    """Texts that the tokens of a vocabulary add, special tokens shown.

    The text of a token is found by decoding it after another token, the anchor, because some decoders change the
    beginning of a text. Raises ModelError if no token of the tokenizer can be the anchor.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._decode = Decoding(tokenizer, skip_special_tokens=False)
        self._anchor, self._anchor_text = self._find_anchor()
        self.special_ids = special_ids(tokenizer)
        self._known: dict[int, bytes] = {}
        self._all: dict[int, list[bytes]] = {}  # by number of tokens

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds after other text; they may be part of a character."""
        if token not in self._known:
            text = self._decode([self._anchor, token])[len(self._anchor_text) :]
            self._known[token] = self._bytes_of_text(token, text)
        return self._known[token]

    def bytes_at_start(self, token: int) -> bytes:
        """Return the UTF-8 bytes a token adds at the start of a text: some decoders strip its first space."""
        return self._bytes_of_text(token, self._decode([token]))

    def label(self, token: int) -> str:
        """Return a text that shows a token: its text or, for part of a character, OpenAI's `bytes:\\xe2\\x82`."""
        added = self.bytes_of(token)
        try:
            return added.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added)

    def all_bytes(self, size: int) -> list[bytes]:
        """Return `bytes_of` of the tokens below `size`; empty for those that the tokenizer does not have."""
        if size not in self._all:
            self._all[size] = self._all_bytes(size, [self._anchor], len(self._anchor_text))
        return self._all[size]

    def all_bytes_at_start(self, size: int) -> list[bytes]:
        """Return `bytes_at_start` of the tokens below `size`."""
        return self._all_bytes(size, [], 0)

    def changed_pair(self, texts: Sequence[bytes]) -> tuple[int, int] | None:
        """Return two tokens that do not add their bytes one after the other; None if no random pair is such.

        `texts` is the result of `all_bytes`, with empty ones for tokens that are not to be checked.
        """
        rng, tokens = random.Random(0), [token for token, text in enumerate(texts) if text]
        for _ in range(NUM_CHECKED_PAIRS if tokens else 0):
            first, second = rng.choice(tokens), rng.choice(tokens)
            try:
                joined = (texts[first] + texts[second]).decode()
            except UnicodeDecodeError:  # parts of characters that do not fit
                continue
            if self._decode([self._anchor, first, second]) != self._anchor_text + joined:
                return first, second
        return None

    def is_at_start(self, context: Sequence[int], differing: int) -> bool:
        """Whether text after a context begins as at the start of a text, where `differing` has other bytes."""
        text = Detokenizer(self._tokenizer, context, skip_special_tokens=True).peek([differing])
        return text == self._decode([differing])

    def _find_anchor(self) -> tuple[int, str]:
        """Return a token that shows ASCII text by itself, and this text."""
        for text in ANCHORS:
            for token in reversed(self._tokenizer(text, add_special_tokens=False).input_ids):
                shown = self._decode([token])
                if shown.strip() and shown.isascii():
                    return token, shown
        raise ModelError(f"the tokenizer has no token for the text {ANCHORS[0]!r}, so the text of tokens is not known")

    def _all_bytes(self, size: int, before: list[int], num_before: int) -> list[bytes]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:  # decodes in parallel, and without transformers' overhead of 10 us a token
            texts = backend.decode_batch([[*before, token] for token in range(size)], skip_special_tokens=False)
        else:
            tokens = frozenset(self._tokenizer.get_vocab().values())
            texts = [self._decode([*before, token] if token in tokens else before) for token in range(size)]
        return [self._bytes_of_text(token, text[num_before:]) for token, text in enumerate(texts)]

    def _bytes_of_text(self, token: int, text: str) -> bytes:
        """Return a token's bytes by its decoded text or, if that is not whole characters, by its spelling."""
        if text and REPLACEMENT not in text:
            return text.encode(errors="replace")  # a slow tokenizer may have lone surrogates
        piece = cast(str, self._tokenizer.convert_ids_to_tokens(token)) or ""
        if not text:  # ByT5 spells a byte as one character, and shows nothing for a part of one
            is_byte = len(piece) == 1 and 0x80 <= ord(piece) <= 0xFF
            return piece.encode("latin-1") if is_byte else b""
        if (spelled := BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes.fromhex(spelled.group(1))
        if all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        return text.encode()


def prompt_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str | None) -> list[str]:
    """Return the texts of a prompt's tokens, which join to `text`, the prompt if it was given as text.

    If the tokens spell it only with special tokens, these show. Else, as for tokenizers that change a text, the texts
    join to `decode(token_ids, skip_special_tokens=True)`.
    """
    hidden, shown = [_split(tokenizer, token_ids, skip_special_tokens) for skip_special_tokens in (True, False)]
    return shown if "".join(hidden) != text == "".join(shown) else hidden


def _split(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens, splits_tokens=True)
    detokenizer.add(token_ids)
    detokenizer.finish()
    return detokenizer.token_texts
