"""Start-up self-check of the fixed-size passes: makes, captures and runs each of them.

A wrong size is thus detected at start-up instead of during a request, and no request waits for a capture.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch

from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.differences import lasting_difference, row_differences
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner

MAX_PROMPT = 40  # tokens of the longest prompt
MAX_DEPTH = 8  # of the trees
MAX_BATCH = 3  # sequences
MAX_TRIES = 20  # random insertions for each token of a tree


def check_fixed_passes(model: ModelRunner, tolerance: float) -> float:
    """Make every pass of a fixed size, and return the largest relative difference from a pass of any size.

    The model must have passed the self-check before. Raises ModelError if a pass differs by more than `tolerance`,
    cannot be captured, or runs out of memory.
    """
    try:
        return _worst_of_passes(model, tolerance)
    except torch.OutOfMemoryError as error:
        raise ModelError("not enough GPU memory to capture passes") from error


def _worst_of_passes(model: ModelRunner, tolerance: float) -> float:
    passes = model.fixed_passes
    assert passes is not None
    rng = random.Random(3)
    context = model.context_length or MAX_PROMPT + 2 * MAX_DEPTH
    longest = max(1, min(MAX_PROMPT, context - MAX_DEPTH - 2))
    slots = []
    for number in range(MAX_BATCH):
        slot = CacheSlot()
        model.begin(slot, longest + passes.max_tokens + 1)
        model.prefill(slot, random_tokens(rng, model, max(1, longest >> number)))
        slots.append(slot)
    worst = 0.0
    for num_tokens, num_sequences in passes.make_all(model.supports_batching):
        num_sequences = min(num_sequences, MAX_BATCH)
        shares = [num_tokens // num_sequences] * num_sequences
        shares[0] += num_tokens - sum(shares)
        sizes = list(zip(slots, shares, strict=False))
        worst = max(worst, lasting_difference(partial(_differences, model, sizes), num_tokens, model.dtype))
        if not worst <= tolerance:
            raise ModelError(
                f"{type(model.model).__name__}: a pass of {num_tokens} tokens of {num_sequences} sequences differs from"
                f" one of any size by {worst:.2g} (allowed: {tolerance:g})"
            )
    return worst


def _differences(model: ModelRunner, sizes: Sequence[tuple[CacheSlot, int]], rng: random.Random) -> list[float]:
    """Feed a random tree after each slot's tokens, in a pass of fixed size and in one of any size.

    `sizes` are the slots and the tokens of their trees. Returns the relative difference of each node's logits.
    """
    longest = model.context_length or MAX_PROMPT + 2 * MAX_DEPTH
    batch = [StepInputs.whole(slot, _tree(rng, model, size, longest - len(slot.tokens))) for slot, size in sizes]
    expected = [model.forward(inputs, commit=False, any_size=True).logits for inputs in batch]
    batched = model.forward_batch(batch, commit=False)
    return [*chain(*(row_differences(one.logits, other) for one, other in zip(batched, expected, strict=True)))]


def random_tokens(rng: random.Random, model: ModelRunner, count: int) -> list[int]:
    return [rng.randrange(model.vocabulary_size) for _ in range(count)]


def _tree(rng: random.Random, model: ModelRunner, size: int, num_left: int) -> TokenTree:
    """Return a random tree of up to `size` tokens that fits the context's remaining `num_left` positions."""
    depth = max(1, min(MAX_DEPTH, num_left - 2))
    tree = TokenTree(random_tokens(rng, model, 1), max_depth=depth)
    for _ in range(MAX_TRIES * size):  # adding a token that its parent already has changes nothing
        if len(tree) < size:
            tree.add(rng.randrange(len(tree)), rng.randrange(model.vocabulary_size))
    return tree
