"""The start-up self-check: does this model compute a token tree as it computes plain text?

Some architectures silently do not (position biases by index, recurrent layers): they are refused.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence

import torch

from lp_runtime.errors import ModelError, first_line
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.step_inputs import StepInputs

log = logging.getLogger(__name__)

# Largest relative difference of a node's logits, ||tree - plain|| / ||plain||, both less their mean. Rounding of an
# exact model stays an order of magnitude below; a wrong mask or position shows far above.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 4e-2, torch.bfloat16: 2e-1}
SHORT_PROMPT = 24
CROSSED_BY = 8  # tokens that the prompt is longer than a window
STRICT_LENGTHS = (20, 123, 190)  # before, across and behind borders of the blocks of strict.py
LONG_STRICT_LENGTHS = (1500, 3000)
LONGEST_PATH = 8
LONGEST_TAIL = 10  # tokens that the check stands behind the prompt


def check_model(model: ModelRunner) -> float:
    """Compare two tree steps, with a commit between them, against plain forward passes of the text on each path.

    The prompt is long enough to cross every sliding window that a text within the model's context can cross. Where
    several sequences in one pass differ from plain text, `model.supports_batching` is turned off.

    Returns:
        the largest relative difference of a node's logits.

    Raises:
        ModelError: if the difference is above the dtype's tolerance, or the model cannot be fed a tree at all.
    """
    name = type(model.model).__name__
    try:
        with model.slots.borrowed() as slot:
            worst = _worst_difference(model, slot)
    except ModelError:
        raise
    except Exception as error:  # any failure of a foreign model here means the same thing: it cannot be served
        how = "" if model.strict_tokens is None else " with exactness=strict"
        raise ModelError(f"{name} cannot be fed a token tree{how}: {first_line(error)}") from error
    tolerance = TOLERANCES.get(model.dtype)
    if tolerance is None:
        raise ModelError(f"{name} computes in {model.dtype}: must be one of {', '.join(map(str, TOLERANCES))}")
    if not worst <= tolerance:
        raise ModelError(
            f"{name} failed the start-up self-check: a tree step differs from plain text by {worst:.2g}"
            f" (allowed: {tolerance:g}); lookahead decoding would be wrong, so this model is refused"
        )
    if model.strict_tokens is not None:
        _check_bits(model)
    if model.supports_batching:
        _check_batching(model, tolerance)
    return worst


def _worst_difference(model: ModelRunner, slot: CacheSlot) -> float:
    """Return the largest relative difference between tree steps and plain text."""
    rng = random.Random(0)
    longest = sys.maxsize if model.context_length is None else model.context_length - LONGEST_TAIL
    crossing = [window + CROSSED_BY for window in model.masks.windows if window + CROSSED_BY <= longest]
    length = max([min(SHORT_PROMPT, longest), *crossing])
    if length < 2:
        raise ModelError(f"a context of {model.context_length} tokens is too short to work in")

    def some_tokens(count: int) -> list[int]:
        return [rng.randrange(model.vocabulary_size) for _ in range(count)]

    prompt, left, right, below = some_tokens(length), some_tokens(3), some_tokens(3), some_tokens(2)
    model.begin(slot, length + 32)
    differences = [_difference(model.prefill(slot, prompt), _plain_logits(model, prompt, 1))]
    # Step 1: two branches under one pending token. Step 2: the left one was accepted and is re-fed as pending.
    root = some_tokens(1)
    tree = TokenTree(root, max_depth=8)
    branches = [tree.add_branch(left), tree.add_branch([left[0], *below]), tree.add_branch(right)]
    differences += _compare(model, slot, tree, branches, prompt)
    tree = TokenTree(left, max_depth=8)
    branches = [tree.add_branch(below), tree.add_branch(right)]
    differences += _compare(model, slot, tree, branches, prompt + root)
    return max(differences)


def _compare(
    model: ModelRunner, slot: CacheSlot, tree: TokenTree, branches: Sequence[list[int]], before: list[int]
) -> list[float]:
    """Return the relative difference of each node's logits on each branch of a tree, fed behind `before`."""
    logits = model.forward(StepInputs.whole(slot, tree)).logits
    text = before + tree.tokens[: tree.root + 1]
    differences = []
    for branch in branches:
        path = [tree.root, *branch]
        plain = _plain_logits(model, text + [tree.tokens[node] for node in branch], len(path))
        tree_logits = logits[[node - tree.root for node in path]]
        differences += [_difference(a, b) for a, b in zip(tree_logits.split(1), plain.split(1), strict=True)]
    return differences


@torch.inference_mode()
def _plain_logits(model: ModelRunner, tokens: list[int], num_last: int) -> torch.Tensor:
    """Return [num_last, V] float32 logits of a text's last tokens, fed without a cache."""
    ids = torch.tensor([tokens], dtype=torch.int64, device=model.device)
    keep = {"logits_to_keep": num_last} if model.keeps_logits else {}
    return model.model(input_ids=ids, use_cache=False, **keep).logits[0, -num_last:].float()


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| of logits less their mean."""
    actual, expected = actual - actual.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def _check_batching(model: ModelRunner, tolerance: float) -> None:
    """Compare two sequences fed in one pass with plain text; turn `supports_batching` off if they differ."""
    rng = random.Random(2)
    batch, texts = [], []
    try:
        for length in (5, 2):
            tokens = [rng.randrange(model.vocabulary_size) for _ in range(length + 1)]
            slot = CacheSlot()
            model.begin(slot, length + 32)
            model.prefill(slot, tokens[:-1])
            batch.append(StepInputs.whole(slot, TokenTree(tokens[-1:], max_depth=1)))
            texts.append(tokens)
        found = [each.logits for each in model.forward_batch(batch)]
        worst = max(_difference(a, _plain_logits(model, b, 1)) for a, b in zip(found, texts, strict=True))
        reason = None if worst <= tolerance else f"they differ by {worst:.2g}"
    except Exception as error:  # of a foreign model
        reason = first_line(error)
    if reason:
        log.warning("%s is fed one sequence at a time: %s", type(model.model).__name__, reason)
        model.supports_batching = False


def _check_bits(model: ModelRunner) -> None:
    """Compare, bit for bit, a text's logits fed one token at a time and as a path through larger trees.

    Raises:
        ModelError: if any bit differs.
    """
    rng = random.Random(1)

    def some_tokens(count: int) -> list[int]:
        return [rng.randrange(model.vocabulary_size) for _ in range(count)]

    longest = sys.maxsize if model.context_length is None else model.context_length
    # Where kernels are chosen by size, as on GPUs, by a longer text, too.
    for length in (*STRICT_LENGTHS, *(LONG_STRICT_LENGTHS if model.device.type == "cuda" else ())):
        if length + LONGEST_PATH > longest:
            continue
        prompt, text = some_tokens(length), some_tokens(LONGEST_PATH)
        with model.slots.borrowed() as slot:
            model.begin(slot, length + 200)
            model.prefill(slot, prompt)
            plain = [model.forward(StepInputs.whole(slot, TokenTree([token], 0))).logits[0] for token in text]
            for num_pending, others in ((1, (5, 5, 5)), (3, (2, 7, 4, 7, 1, 6, 3, 5, 7, 7)), (LONGEST_PATH, ())):
                tree = TokenTree(text[:num_pending], LONGEST_PATH)
                for size in others:
                    tree.add_branch(some_tokens(size))
                nodes = [tree.root, *tree.add_branch(text[num_pending:])]
                model.begin(slot, length + 200)
                model.prefill(slot, prompt)
                logits = model.forward(StepInputs(slot, tree, list(range(len(tree))), nodes)).logits
                if not all(map(torch.equal, logits, plain[num_pending - 1 :])):
                    raise ModelError(
                        f"{type(model.model).__name__} failed the check of exactness=strict: its logits depend on what"
                        " else is fed; use exactness=fast, or float32"
                    )
