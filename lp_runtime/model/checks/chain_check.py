"""Start-up self-check of a model that is fed chains: does it continue from its cache as in `generate`?"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial

import torch

from lp_runtime.errors import ModelError, first_line
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.checks.check_passes import random_tokens
from lp_runtime.model.checks.self_check import BEFORE_THRESHOLD, Comparison, lengths_to_cross, worst_difference
from lp_runtime.model.forward.by_generate import FeedByGenerate
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.differences import difference_of, row_differences
from lp_runtime.model.kv_cache.slots import CacheSlot

TEXT_TOKENS = 48
CROSSED_BY = 32  # tokens of a chain beyond a length: an effect that grows with the number of other keys may show late
PROMPT_TOKENS = 28
# Each step: index of the first token fed, index of the root, number of right tokens in its chain, number of wrong ones.
# This covers chains that are wrong, right at first and right to the end, and the step that follows each of them.
STEPS = ((28, 28, 0, 4), (28, 29, 2, 1), (28, 32, 3, 0), (36, 36, 2, 2), (36, 39, 0, 0), (40, 40, 5, 0))


def check_chains(model: ChainRunner) -> float:
    """Check steps, some with rejected chains, against `generate`; return the worst relative difference."""
    try:
        with model.slots.borrowed() as slot:
            return worst_difference(model, "several tokens fed after its cache differ", "", _comparisons(model, slot))
    except ModelError:
        raise
    except Exception as error:  # whatever the model's code raises here, the model cannot be served
        name = type(model.model).__name__
        raise ModelError(f"{name} cannot be fed chains of guesses: {first_line(error)}") from error


def _comparisons(model: ChainRunner, slot: CacheSlot) -> Iterator[Comparison]:
    yield Comparison("`generate`", "", partial(_differences, model, slot), 0)
    for field, length in lengths_to_cross(model).items():
        compare = partial(_differences_at, model, slot, length)
        yield Comparison("`generate`", f" around {field}={length}", compare, length)


@torch.inference_mode()
def _differences(model: ChainRunner, slot: CacheSlot, rng: random.Random) -> list[float]:
    """Return the relative difference from `generate` of the prompt's last logits and of each of the steps."""
    longest = min(model.context_length or sys.maxsize, model.rotary_lengths.threshold)
    if longest < TEXT_TOKENS:
        raise ModelError(f"a context of {longest} tokens is too short to work in")
    text = random_tokens(rng, model, TEXT_TOKENS)
    expected = model.feed(FeedByGenerate(text, PROMPT_TOKENS))  # the first row is of the prompt's last token
    model.begin(slot, TEXT_TOKENS)
    model.prefill(slot, text[PROMPT_TOKENS:])  # another sequence: `begin` must discard it
    model.begin(slot, TEXT_TOKENS)
    differences = row_differences(model.prefill(slot, text[:PROMPT_TOKENS]), expected[:1])
    for start, root, num_right, num_wrong in STEPS:
        tree = TokenTree(text[start : root + 1], max_depth=TEXT_TOKENS)
        following = text[root + 1 : root + 1 + num_right + num_wrong]
        wrong = [(token + 1) % model.vocabulary_size for token in following[num_right:]]
        tree.add_branch(following[:num_right] + wrong)
        nodes = range(len(tree))
        logits = model.forward(StepInputs(slot, tree, nodes, nodes, start)).logits
        first, num_checked = start + 1 - PROMPT_TOKENS, root + 1 + num_right - start
        differences.append(difference_of(logits[:num_checked], expected[first : first + num_checked]))
    return differences


@torch.inference_mode()
def _differences_at(model: ChainRunner, slot: CacheSlot, length: int, rng: random.Random) -> list[float]:
    """Return the relative differences from `generate` of a chain across a length, and of single tokens across it."""
    start = length - BEFORE_THRESHOLD
    longest = min(length + CROSSED_BY, model.context_length or sys.maxsize)
    text = random_tokens(rng, model, longest)
    model.begin(slot, longest)
    model.prefill(slot, text[:start])
    tree = TokenTree(text[start : start + 1], max_depth=longest)
    tree.add_branch(text[start + 1 :])
    nodes = range(len(tree))
    logits = model.forward(StepInputs(slot, tree, nodes, nodes, start)).logits
    expected = model.feed(FeedByGenerate(text, start))[1:]
    model.begin(slot, longest)
    model.prefill(slot, text[:start])
    one_by_one = [model.forward(StepInputs(slot, TokenTree([token], 0), [0], [0])).logits for token in text[start:]]
    return [difference_of(logits, expected), *row_differences(torch.cat(one_by_one), expected)]
