"""Which stop strings a model can write at all."""

from __future__ import annotations

from collections.abc import Sequence, Set

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import RequestError
from lp_runtime.text.decoding import Decoding
from lp_runtime.text.token_text import TokenTexts


def check_stop_strings(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
    """Raise RequestError if no text of a tokenizer contains a string: capitals, for example."""
    decode = Decoding(tokenizer, skip_special_tokens=False)
    unusual = [each for each in strings if each not in decode(tokenizer(each, add_special_tokens=False).input_ids)]
    texts = frozenset(TokenTexts(tokenizer).all_bytes(len(tokenizer))) - {b""} if unusual else frozenset()
    for string in unusual:
        if not _can_be_spelled(string.encode(), texts):
            raise RequestError(f"stop={string!r}: can never match: no text of the model's tokenizer contains it")


def _can_be_spelled(wanted: bytes, texts: Set[bytes]) -> bool:
    """Return whether a sequence of texts contains `wanted`."""
    if any(wanted in text for text in texts):
        return True
    reached, ends = _partial_matches(wanted, texts)
    size, longest = len(wanted), max(map(len, texts), default=0)
    for num in range(1, size):
        if num in reached and num in ends:
            return True
        if num in reached:
            reached |= {end for end in range(num + 1, min(num + longest + 1, size)) if wanted[num:end] in texts}
    return False


def _partial_matches(wanted: bytes, texts: Set[bytes]) -> tuple[set[int], set[int]]:
    """Return (starts, ends): lengths of the parts of `wanted` that end a text, and those before a part that begins one.

    Looks at each text once, however long `wanted` is.
    """
    size = len(wanted)
    starts: set[int] = set()
    ends: set[int] = set()
    for text in texts:
        lengths = range(1, min(len(text) + 1, size))
        if text[-1] in wanted:  # skips most texts
            starts |= {num for num in lengths if text.endswith(wanted[:num])}
        if text[0] in wanted:
            ends |= {size - num for num in lengths if text.startswith(wanted[size - num :])}
    return starts, ends
