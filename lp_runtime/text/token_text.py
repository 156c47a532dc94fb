"""Text and bytes of single tokens, for constraints and log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lp_runtime.text.decoding import BYTE_TOKEN, REPLACEMENT, Decoding, Tokenizer
from lp_runtime.text.detokenizer import is_visible

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # for byte-level vocabularies (GPT-2)
NUM_CHECKED_PAIRS = 200
ANCHORS = "aA1.x"  # texts one of whose last tokens precedes a token whose text is asked for
MAX_ANCHORS = 100  # first tokens of the vocabulary that are tried if none of these suits


class TokenTexts:
    """What each token of a vocabulary adds to a text, special tokens shown.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._decoding = Decoding(tokenizer)
        self._anchor, self._anchor_text = self._find_anchor()
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds after other text; they may be part of a character."""
        if token not in self._known:
            text = self._decode([self._anchor, token])[len(self._anchor_text) :]
            self._known[token] = self._bytes_of_text(token, text)
        return self._known[token]

    def bytes_at_start(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token that begins a text: some decoders strip its first space."""
        return self._bytes_of_text(token, self._decode([token]))

    def label(self, token: int) -> str:
        """Return a text that shows a token: its text, or `bytes:\\xe2\\x82` for a part of a character, as OpenAI does."""
        added = self.bytes_of(token)
        try:
            return added.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added)

    def all_bytes(self, size: int) -> list[bytes]:
        """Return `bytes_of` of the tokens below `size`; empty for those that the tokenizer does not have."""
        return self._all(size, [self._anchor], len(self._anchor_text))

    def all_bytes_at_start(self, size: int) -> list[bytes]:
        """Return `bytes_at_start` of the tokens below `size`; empty for those that the tokenizer does not have."""
        return self._all(size, [], 0)

    def changed_pair(self, size: int) -> tuple[int, int] | None:
        """Return two tokens whose text together is not that of one after the other; None if none is found.

        Random pairs are tried: with decoders that join or separate tokens by what the next one is, many differ.
        """
        rng, texts = random.Random(0), self.all_bytes(size)
        tokens = [token for token, added in enumerate(texts) if added and not self._is_special(token)]
        for _ in range(NUM_CHECKED_PAIRS if tokens else 0):
            first, second = rng.choice(tokens), rng.choice(tokens)
            joined = self._anchor_text.encode() + texts[first] + texts[second]
            if self._decode([self._anchor, first, second]) != joined.decode(errors="replace"):
                is_text = REPLACEMENT not in joined.decode(errors="replace")  # decoders differ in what they replace
                if is_text:
                    return first, second
        return None

    def _all(self, size: int, before: list[int], num_skipped: int) -> list[bytes]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        num = min(size, len(self._tokenizer))
        if backend is not None:  # decodes in parallel, without transformers' overhead of 10 us a token
            texts = backend.decode_batch([[*before, token] for token in range(num)], skip_special_tokens=False)
        else:
            texts = [self._decode([*before, token]) for token in range(num)]
        known = [self._bytes_of_text(token, text[num_skipped:]) for token, text in enumerate(texts)]
        return known + [b""] * (size - num)

    def _bytes_of_text(self, token: int, text: str) -> bytes:
        """Return a token's bytes by its decoded text, or by its spelling if the text is not whole characters."""
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if (spelled := BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes.fromhex(spelled.group(1))
        if all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        return text.encode()
