"""Start-up self-check: does this model compute a token tree as it computes plain text?

Some architectures silently do not (position biases by index, recurrent layers) and are refused. Some fail only beyond a
certain length, so the check goes to every length that the configuration names (support.py), and a little further.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from lp_runtime.errors import ModelError, first_line
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.checks.check_passes import check_fixed_passes, random_tokens
from lp_runtime.model.forward.by_generate import FeedByGenerate
from lp_runtime.model.forward.passes import FeedText
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.differences import lasting_difference, row_differences, tolerance_of
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.support import likely_reason, thresholds_of

log = logging.getLogger(__name__)

SHORT_PROMPT = 24
BEFORE_THRESHOLD = 6  # tokens between the first tree at a threshold and the threshold
CROSSED_BY = 8  # tokens by which the check continues past a threshold
ACCEPTED = 3  # tokens that each step at a threshold commits
NUM_DECOYS = 12  # branches before the accepted one, so that cache indices pass a threshold long before positions do
STRICT_LENGTHS = (20, 123, 190)  # before, across and after block boundaries of strict.py
LONG_STRICT_LENGTHS = (1500, 3000)
LONGEST_PATH = 8
LONGEST_TAIL = 10  # tokens that the check needs after the prompt


class Comparison(NamedTuple):
    """One part of a self-check: `reference` and `where` are parts of the refusal."""

    reference: str  # what the runner's logits are compared with
    where: str  # " around" a length; may be empty
    # Takes a random text; returns the relative differences at its places.
    compare: Callable[[random.Random], Iterable[float]]
    seed: int


def worst_difference(model: ModelRunner, what: str, reason: str, comparisons: Iterable[Comparison]) -> float:
    """Return the largest relative difference of all comparisons; refuse the model at the first that is too large.

    `what` and `reason` are parts of the refusal: what differs, and a likely reason, which may be empty.
    """
    name, worst = type(model.model).__name__, 0.0
    tolerance = tolerance_of(name, model.dtype)
    ending = f"lookahead decoding would be wrong, so this model is refused{reason and ': '}{reason}"
    for reference, where, compare, seed in comparisons:
        difference = lasting_difference(compare, seed, model.dtype)
        if math.isnan(difference):
            raise ModelError(
                f"{name} failed the start-up self-check: its logits are NaN{where}; check its weights and dtype"
            )
        if difference > tolerance:
            raise ModelError(
                f"{name} failed the start-up self-check: {what} from {reference}{where} by {difference:.2g}"
                f" (allowed: {tolerance:g}); {ending}"
            )
        worst = max(worst, difference)
    return worst


def check_model(model: ModelRunner) -> float:
    """Compare tree steps with plain forward passes and with `generate`; refuse a model that differs.

    Two tree steps with a commit between them come first, compared with plain passes of the text on each path. Then a
    prompt and a step are compared with `generate`. Then the check decodes, as `generate` does, across every length
    within the model's context beyond which, by its configuration, the model may attend differently. If several
    sequences in one pass differ from plain text, it sets `model.refuses_batches`. Returns the largest relative
    difference of a node's logits.
    """
    reason = likely_reason(model.model)
    try:
        with model.slots.borrowed() as slot:
            worst = worst_difference(model, "a tree step differs", reason, _comparisons(model, slot))
    except ModelError:
        raise
    except Exception as error:  # whatever the model's code raises here, the model cannot be served
        how = "" if model.strict_tokens is None else " with exactness=strict"
        name = type(model.model).__name__
        raise ModelError(f"{name} cannot be fed a token tree{how}: {reason or first_line(error)}") from error
    return max(worst, _check_other_passes(model))


def _comparisons(model: ModelRunner, slot: CacheSlot) -> Iterator[Comparison]:
    yield Comparison("plain text", "", partial(_differences, model, slot), 0)
    yield Comparison("`generate`", "", partial(_differences_from_generate, model, slot), 0)
    for field, threshold in lengths_to_cross(model).items():
        starts = [threshold - BEFORE_THRESHOLD]
        if threshold == model.rotary_lengths.threshold:  # a longer prompt has other rotary factors
            starts.append(threshold + 1)
        for start in starts:
            log.info("checking %s around %d tokens", type(model.model).__name__, threshold)
            compare = partial(_differences_at, model, slot, threshold, start)
            yield Comparison("`generate`", f" around {field}={threshold}", compare, threshold)


def _check_other_passes(model: ModelRunner) -> float:
    """Check strict, batched and fixed-size passes; return the largest difference of a captured one, or 0."""
    tolerance = tolerance_of(type(model.model).__name__, model.dtype)
    if model.strict_tokens is not None:
        _check_bits(model)
    if model.supports_batching:
        _check_batching(model, tolerance)
    is_captured = model.graphs is not None and model.graphs.capture
    return check_fixed_passes(model, tolerance) if is_captured else 0.0


def check_model_or_disable_graphs(model: ModelRunner) -> float:
    """Return `check_model`'s result; if it fails with fixed-size passes, disable these and check again."""
    if model.graphs is not None:
        refuses_batches = model.refuses_batches
        try:
            return check_model(model)
        except ModelError as error:
            log.warning("%s; going on with compile=off", error)
            model.disable_graphs(str(error))
            model.refuses_batches = refuses_batches  # batches may have failed by the graphs, too
    return check_model(model)


def _differences(model: ModelRunner, slot: CacheSlot, rng: random.Random) -> list[float]:
    """Compare two tree steps after a random prompt; return the relative difference of each node's logits."""
    length = _prompt_length(model)
    prompt, left, right, below = (random_tokens(rng, model, count) for count in (length, 3, 3, 2))
    model.begin(slot, length + 32)
    differences = row_differences(model.prefill(slot, prompt), _plain_logits(model, prompt, 1))
    # Step 1: two branches under one pending token. Step 2: the left one was accepted and is re-fed as pending.
    root = random_tokens(rng, model, 1)
    tree = TokenTree(root, max_depth=8)
    branches = [tree.add_branch(left), tree.add_branch([left[0], *below]), tree.add_branch(right)]
    differences += _compare(model, slot, tree, branches, prompt)
    tree = TokenTree(left, max_depth=8)
    branches = [tree.add_branch(below), tree.add_branch(right)]
    return differences + _compare(model, slot, tree, branches, prompt + root)


def _prompt_length(model: ModelRunner) -> int:
    # Stay below the rotary threshold: beyond it a text fed in one pass differs from one fed token by token.
    longest = min(model.context_length or sys.maxsize, model.rotary_lengths.threshold)
    if longest < LONGEST_TAIL + 2:
        raise ModelError(f"a context of {model.context_length} tokens is too short to work in")
    return min(SHORT_PROMPT, longest - LONGEST_TAIL)


def _differences_from_generate(model: ModelRunner, slot: CacheSlot, rng: random.Random) -> list[float]:
    """Compare a prompt and a path of a tree with `generate`; return the relative difference of each token's logits."""
    length = _prompt_length(model)
    text = random_tokens(rng, model, length + 1 + ACCEPTED)
    expected = model.feed(FeedByGenerate(text, length))
    model.begin(slot, length + 32)
    differences = row_differences(model.prefill(slot, text[:length]), expected[:1])
    tree = TokenTree(text[length : length + 1], max_depth=ACCEPTED)
    tree.add_branch(text[length + 1 :])
    logits = model.forward(StepInputs.whole(slot, tree)).logits
    return differences + row_differences(logits, expected[1:])


def lengths_to_cross(model: ModelRunner) -> dict[str, int]:
    """Return the lengths to decode across, ascending, keyed by a config field that names the length."""
    longest = model.context_length or sys.maxsize
    thresholds = {"max_position_embeddings": model.rotary_lengths.threshold}
    thresholds |= thresholds_of(model.model.config.get_text_config())
    fields = {
        threshold: field
        for field, threshold in thresholds.items()
        if threshold > BEFORE_THRESHOLD + 1 and threshold + CROSSED_BY + ACCEPTED <= longest
    }
    return {fields[threshold]: threshold for threshold in sorted(fields)}


@torch.inference_mode()
def _differences_at(model: ModelRunner, slot: CacheSlot, threshold: int, start: int, rng: random.Random) -> list[float]:
    """Decode around a length in trees and token by token; return the relative difference of each node's logits.

    If the model itself fails at such lengths, log a warning and return [0]. `start` is the number of prompt tokens.
    """
    text = random_tokens(rng, model, threshold + CROSSED_BY + ACCEPTED)
    try:
        expected = model.feed(FeedByGenerate(text, start))
    except Exception as error:  # raised by the model's own code, at a length that its configuration allows
        what = f"{type(model.model).__name__} cannot decode {len(text)} tokens even without trees"
        log.warning("%s; skipping the check there: %s", what, first_line(error))
        return [0.0]
    model.begin(slot, len(text) + NUM_DECOYS * ACCEPTED)
    differences = row_differences(model.prefill(slot, text[:start]), expected[:1])
    pending, root = start, start  # indices into the text
    while root + ACCEPTED < len(text):
        depth = model.rotary_lengths.num_together(root, ACCEPTED + 1) - 1
        tree = TokenTree(text[pending : root + 1], max_depth=depth)
        for _ in range(NUM_DECOYS):
            tree.add_branch(random_tokens(rng, model, depth))
        nodes = [tree.root, *tree.add_branch(text[root + 1 : root + 1 + depth])]
        logits = model.forward(StepInputs.whole(slot, tree)).logits
        first = root + 1 - start
        differences += row_differences(
            logits[[node - tree.root for node in nodes]], expected[first : first + len(nodes)]
        )
        pending, root = root + 1, root + max(1, depth)
    return differences


def _compare(
    model: ModelRunner, slot: CacheSlot, tree: TokenTree, branches: Sequence[list[int]], before: list[int]
) -> list[float]:
    """Feed a tree after `before`, and return the relative difference of each node's logits on each branch."""
    logits = model.forward(StepInputs.whole(slot, tree)).logits
    text = before + tree.tokens[: tree.root + 1]
    differences = []
    for branch in branches:
        path = [tree.root, *branch]
        plain = _plain_logits(model, text + [tree.tokens[node] for node in branch], len(path))
        differences += row_differences(logits[[node - tree.root for node in path]], plain)
    return differences


def _plain_logits(model: ModelRunner, tokens: list[int], num_last: int) -> torch.Tensor:
    """Return [num_last, V] float32 logits of a text's last tokens, computed without a cache."""
    return model.feed(FeedText(tokens, num_last)).float()


def _check_batching(model: ModelRunner, tolerance: float) -> None:
    """Compare two sequences in one pass with plain text; set `refuses_batches` if they differ."""
    try:
        worst = lasting_difference(partial(_batch_differences, model), 2, model.dtype)
        reason = None if worst <= tolerance else f"they differ by {worst:.2g}"
    except Exception as error:  # raised by the model's own code
        reason = first_line(error)
    if reason:
        log.warning("%s is fed one sequence at a time: %s", type(model.model).__name__, reason)
        model.refuses_batches = True


def _batch_differences(model: ModelRunner, rng: random.Random) -> list[float]:
    batch, texts = [], []
    for length in (5, 2):
        tokens = random_tokens(rng, model, length + 1)
        slot = CacheSlot()
        model.begin(slot, length + 32)
        model.prefill(slot, tokens[:-1])
        batch.append(StepInputs.whole(slot, TokenTree(tokens[-1:], max_depth=1)))
        texts.append(tokens)
    batched = [each.logits for each in model.forward_batch(batch)]
    return [*chain(*(row_differences(a, _plain_logits(model, b, 1)) for a, b in zip(batched, texts, strict=True)))]


def _check_bits(model: ModelRunner) -> None:
    """Raise ModelError unless a text has equal logits, bit for bit, token by token and in larger trees."""
    rng = random.Random(1)
    longest = model.context_length or sys.maxsize
    # GPU libraries choose kernels by size, so check longer texts there too.
    for length in (*STRICT_LENGTHS, *(LONG_STRICT_LENGTHS if model.device.type == "cuda" else ())):
        if length + LONGEST_PATH > longest:
            continue
        prompt, text = random_tokens(rng, model, length), random_tokens(rng, model, LONGEST_PATH)
        with model.slots.borrowed() as slot:
            model.begin(slot, length + 200)
            model.prefill(slot, prompt)
            plain = [model.forward(StepInputs.whole(slot, TokenTree([token], 0))).logits[0] for token in text]
            for num_pending, others in ((1, (5, 5, 5)), (3, (2, 7, 4, 7, 1, 6, 3, 5, 7, 7)), (LONGEST_PATH, ())):
                tree = TokenTree(text[:num_pending], LONGEST_PATH)
                for size in others:
                    tree.add_branch(random_tokens(rng, model, size))
                nodes = [tree.root, *tree.add_branch(text[num_pending:])]
                model.begin(slot, length + 200)
                model.prefill(slot, prompt)
                logits = model.forward(StepInputs(slot, tree, list(range(len(tree))), nodes)).logits
                if not all(map(torch.equal, logits, plain[num_pending - 1 :])):
                    raise ModelError(
                        f"{type(model.model).__name__} failed the check of exactness=strict: its logits depend on what"
                        " else is fed; use exactness=fast, or float32"
                    )
