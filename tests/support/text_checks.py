"""Checks of lp_runtime/text against transformers' decode, for tests and for benchmarks/correctness.py.

A check takes a tokenizer, a prompt, new tokens and a seed. It returns a fault in one line, or None. The seed determines
everything else: steps, stop strings, whether special tokens show.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from lp_runtime.errors import LookaheadError
from lp_runtime.text.decoding import REPLACEMENT
from lp_runtime.text.detokenizer import Detokenizer
from lp_runtime.text.stop_strings import StopStrings
from lp_runtime.text.token_text import TokenTexts
from support.token_sequences import cut

Check = Callable[[PreTrainedTokenizerBase, Sequence[int], Sequence[int], int], str | None]

# Kinds in which a token's text depends on its neighbors: by suffixes of words, repetitions, spaces before punctuation,
# or by what the decoder does with characters that byte tokens spell.
NOT_TOKEN_BY_TOKEN = {"clip", "fused_replace", "unigram_cleaned", "wordpiece_cleaned", "openai_gpt", "ctc", "ctrl"}
NOT_TOKEN_BY_TOKEN |= {"bpe_cleaned", "bytes_unfused", "strip_right"}
# Kinds for which StopStringCriteria is right. For the others it decodes each piece alone, after "abcdef". It misses
# changes by neighbors (NOT_TOKEN_BY_TOKEN), the first piece's ## (wordpiece), or bytes (bytes_unfused, byt5).
# Without a decoder it cannot be created at all: "substring not found".
CRITERIA_KINDS = {"byte_level", "byte_level_added", "llama3", "tiktoken", "demo_model"}
CRITERIA_KINDS |= {"llama2", "llama2_added", "llama_class", "gemma", "strip_right"}
CRITERIA_KINDS |= {"metaspace_always", "metaspace_first", "metaspace_never", "t5"}


def text_of(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """Return the text that `new` adds: decode(prompt + new) after its common prefix with decode(prompt)."""
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=skip_special_tokens)
    before = tokenizer.decode(list(prompt), skip_special_tokens=skip_special_tokens)
    return whole[len(os.path.commonprefix([whole, before])) :]


def deltas_fault(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], seed: int
) -> str | None:
    """Check that deltas join to the text, whatever the steps."""
    rng = random.Random(seed)
    skips, steps = rng.random() < 0.7, cut(new, rng)
    detokenizer = Detokenizer(tokenizer, prompt, skips)
    deltas = [*map(detokenizer.add, steps), detokenizer.finish()]
    expected = text_of(tokenizer, prompt, new, skips)
    if "".join(deltas) == expected:
        return None
    return f"deltas {deltas} of steps of {[*map(len, steps)]}, skip_special_tokens={skips}; the text is {expected!r}"


def token_texts_fault(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], seed: int
) -> str | None:
    """Check that texts of tokens join to the text, do not depend on the steps, and never change."""
    rng = random.Random(seed)
    skips, steps = rng.random() < 0.7, cut(new, rng)
    detokenizer = Detokenizer(tokenizer, prompt, skips, splits_tokens=True)
    shown, history = "", []
    for step in steps:
        shown += detokenizer.add(step)
        history.append(list(detokenizer.token_texts))
        if not shown.startswith("".join(history[-1])):
            return f"token_texts {history[-1]} are ahead of the deltas {shown!r}"
    shown += detokenizer.finish()
    texts, expected = detokenizer.token_texts, text_of(tokenizer, prompt, new, skips)
    if shown != expected:
        return (
            f"deltas join to {shown!r} with splits_tokens=True, skip_special_tokens={skips}; the text is {expected!r}"
        )
    if "".join(texts) != expected or len(texts) != len(new):
        return f"token_texts {texts} of {len(new)} tokens, skip_special_tokens={skips}; the text is {expected!r}"
    if any(texts[: len(earlier)] != earlier for earlier in history):
        return f"token_texts {texts} have changed: {history}"
    whole = Detokenizer(tokenizer, prompt, skips, splits_tokens=True)
    whole.add(new)
    whole.finish()
    return None if whole.token_texts == texts else f"token_texts {texts}, and {whole.token_texts} in one step"


def stop_strings_fault(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], seed: int
) -> str | None:
    """Check that stop strings end the tokens where the text first contains one, whatever the steps."""
    rng = random.Random(seed)
    strings = random_strings(text_of(tokenizer, prompt, new, False), rng)
    stop, actual, num_before = StopStrings(tokenizer, strings, prompt), None, 0
    for step in cut(new, rng):
        num_kept = stop(step)
        if num_kept is not None:
            actual = num_before + num_kept
            break
        num_before += len(step)
    expected = first_stop(tokenizer, prompt, new, strings)
    return None if actual == expected else f"stop strings {strings} end after {actual} tokens, not {expected}"


def criteria_fault(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], seed: int
) -> str | None:
    """Check new tokens without a prompt against StopStringCriteria, if both mean the same text.

    StopStringCriteria errs in three ways. It does not know that decode shows incomplete characters as U+FFFD. It takes
    byte tokens for characters even if their run has an invalid byte, for which decode shows U+FFFD throughout. It takes
    the space that decode strips at the beginning of a text for a part of it.
    """
    new = [token for token in new if token < len(tokenizer)]  # StopStringCriteria has no row for other ids
    text, vocabulary = text_of(tokenizer, (), new, False), tokenizer.get_vocab()
    strings = random_strings(text, random.Random(seed))
    strings = [each for each in strings if REPLACEMENT not in each and not each.startswith(" ")]
    if not strings or ("<0x00>" in vocabulary and REPLACEMENT in text):
        return None
    criteria = StopStringCriteria(tokenizer, strings)
    stops = (num for num in range(1, len(new) + 1) if criteria(torch.tensor([new[:num]]), None).item())
    actual, expected = next(stops, None), StopStrings(tokenizer, strings)(new)
    return None if actual == expected else f"{strings}: {expected} tokens, StopStringCriteria keeps {actual}"


def bytes_fault(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], seed: int) -> str | None:
    """Check that bytes of tokens join to the text after a word, if the text is whole characters."""
    word = tokenizer.encode("the", add_special_tokens=False)
    expected = text_of(tokenizer, word, new, False)
    if REPLACEMENT in expected:
        return None
    texts = TokenTexts(tokenizer)
    actual = [texts.bytes_of(token) for token in new]
    joined = b"".join(actual).decode(errors="ignore")  # ByT5's decode leaves out bytes that make no character
    return None if joined == expected else f"bytes {actual}; the text is {expected!r}"


def random_strings(text: str, rng: random.Random) -> list[str]:
    """Return one to three strings, most of them parts of a text."""
    strings = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) or 1)
        part = text[start : start + rng.randint(1, 5)]
        is_part = bool(part) and rng.random() < 0.8
        strings.append(part if is_part else "".join(rng.choices("ae st\n.é北\ufffd", k=rng.randint(1, 3))))
    return strings


def first_stop(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], strings: Sequence[str]
) -> int | None:
    """Return the number of new tokens whose text is the first to contain one of the strings."""
    texts = (text_of(tokenizer, prompt, new[:num], False) for num in range(1, len(new) + 1))
    return next((num for num, text in enumerate(texts, 1) if any(string in text for string in strings)), None)


def fault_of(
    check: Check, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], seed: int
) -> str | None:
    """Return a check's fault; an error that lp_runtime raises is one, too."""
    try:
        return check(tokenizer, prompt, new, seed)
    except LookaheadError as error:
        return f"{type(error).__name__}: {error}"


def smallest_fault(
    check: Check, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], seed: int
) -> str:
    """Return a fault and its input, without tokens that the fault does not need."""
    tokens, num_prompt = [*prompt, *new], len(prompt)
    size = len(tokens)
    while size := size // 2:
        start = 0
        while start < len(tokens):
            fewer = tokens[:start] + tokens[start + size :]
            num_left = num_prompt - len(range(start, min(start + size, num_prompt)))
            if fault_of(check, tokenizer, fewer[:num_left], fewer[num_left:], seed) is None:
                start += size
            else:
                tokens, num_prompt = fewer, num_left
    pieces = tokenizer.convert_ids_to_tokens(tokens)
    fault = fault_of(check, tokenizer, tokens[:num_prompt], tokens[num_prompt:], seed)
    return f"prompt {pieces[:num_prompt]}, new {pieces[num_prompt:]}, seed {seed}: {fault}"


def kinds_of(check: Check, kinds: Sequence[str]) -> list[str]:
    """Return the kinds that a check is made for."""
    if check is criteria_fault:
        return [kind for kind in kinds if kind in CRITERIA_KINDS]
    return [kind for kind in kinds if check is not bytes_fault or kind not in NOT_TOKEN_BY_TOKEN]


CHECKS: dict[str, Check] = {
    "deltas": deltas_fault,
    "token_texts": token_texts_fault,
    "bytes": bytes_fault,
    "stop_strings": stop_strings_fault,
    "criteria": criteria_fault,
}
