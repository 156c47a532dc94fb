"""Start-up self-check of a model that is fed chains: does it continue from its cache as in plain text?"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial

import torch

from lp_runtime.errors import ModelError, first_line
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.checks.check_passes import random_tokens
from lp_runtime.model.checks.self_check import BEFORE_THRESHOLD, lengths_to_cross
from lp_runtime.model.forward.passes import FeedOneByOne
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.differences import difference_of, lasting_difference, row_differences, tolerance_of
from lp_runtime.model.kv_cache.slots import CacheSlot

TEXT_TOKENS = 48
CROSSED_BY = 32  # tokens of a chain beyond a length: an effect that grows with the number of other keys may show late
PROMPT_TOKENS = 28
# How much further from plain text a model may be that is fed one token at a time, as `generate` does: transformers'
# Nemotron-H clamps a time step only in passes of several tokens, and is 1e-3 off in float32.
ALONE_MULTIPLE = 100
# Each step: index of the first token fed, index of the root, number of right tokens in its chain, number of wrong ones.
# This covers chains that are wrong, right at first and right to the end, and the step that follows each of them.
STEPS = ((28, 28, 0, 4), (28, 29, 2, 1), (28, 32, 3, 0), (36, 36, 2, 2), (36, 39, 0, 0), (40, 40, 5, 0))


def check_chains(model: ChainRunner) -> float:
    """Check steps, some with rejected chains, against plain passes; return the worst relative difference."""
    name = type(model.model).__name__
    tolerance = tolerance_of(name, model.dtype)
    try:
        with model.slots.borrowed() as slot:
            worst, where = lasting_difference(partial(_differences, model, slot), 0, model.dtype), ""
            for field, length in lengths_to_cross(model).items():
                if worst <= tolerance:
                    there = lasting_difference(partial(_differences_at, model, slot, length), length, model.dtype)
                    worst, where = max(worst, there), f" around {field}={length}"
    except ModelError:
        raise
    except Exception as error:  # whatever the model's code raises here, the model cannot be served
        raise ModelError(f"{name} cannot be fed chains of guesses: {first_line(error)}") from error
    if not worst <= tolerance:
        raise ModelError(
            f"{name} failed the start-up self-check: several tokens fed after its cache differ from plain text"
            f"{where} by {worst:.2g} (allowed: {tolerance:g}); lookahead decoding would be wrong, so this model is"
            " refused"
        )
    return worst


@torch.inference_mode()
def _differences(model: ChainRunner, slot: CacheSlot, rng: random.Random) -> list[float]:
    """Return the relative difference from plain text of the prompt's last logits and of each of the steps."""
    longest = min(model.context_length or sys.maxsize, model.rotary_lengths.threshold)
    if longest < TEXT_TOKENS:
        raise ModelError(f"a context of {longest} tokens is too short to work in")
    text = random_tokens(rng, model, TEXT_TOKENS)
    expected = _plain_logits(model, text, len(text))
    model.begin(slot, TEXT_TOKENS)
    model.prefill(slot, text[PROMPT_TOKENS:])  # another sequence: `begin` must discard it
    model.begin(slot, TEXT_TOKENS)
    differences = row_differences(
        model.prefill(slot, text[:PROMPT_TOKENS]), expected[PROMPT_TOKENS - 1 : PROMPT_TOKENS]
    )
    for start, root, num_right, num_wrong in STEPS:
        tree = TokenTree(text[start : root + 1], max_depth=TEXT_TOKENS)
        following = text[root + 1 : root + 1 + num_right + num_wrong]
        wrong = [(token + 1) % model.vocabulary_size for token in following[num_right:]]
        tree.add_branch(following[:num_right] + wrong)
        nodes = range(len(tree))
        logits = model.forward(StepInputs(slot, tree, nodes, nodes, start)).logits
        last = root + 1 + num_right
        differences.append(difference_of(logits[: last - start], expected[start:last]))
    return differences


@torch.inference_mode()
def _differences_at(model: ChainRunner, slot: CacheSlot, length: int, rng: random.Random) -> list[float]:
    """Return the relative difference from plain text of a chain across a length.

    The differences of single tokens across it, divided by ALONE_MULTIPLE, count too.
    """
    start = length - BEFORE_THRESHOLD
    longest = min(length + CROSSED_BY, model.context_length or sys.maxsize)
    text = random_tokens(rng, model, longest)
    model.begin(slot, longest)
    model.prefill(slot, text[:start])
    tree = TokenTree(text[start : start + 1], max_depth=longest)
    tree.add_branch(text[start + 1 :])
    nodes = range(len(tree))
    logits = model.forward(StepInputs(slot, tree, nodes, nodes, start)).logits
    plain = _plain_logits(model, text, len(tree))
    model.begin(slot, longest)
    model.prefill(slot, text[:start])
    one_by_one = [model.forward(StepInputs(slot, TokenTree([token], 0), [0], [0])).logits for token in text[start:]]
    alone = row_differences(torch.cat(one_by_one), plain)
    return [difference_of(logits, plain), *(each / ALONE_MULTIPLE for each in alone)]


def _plain_logits(model: ChainRunner, text: Sequence[int], num_last: int) -> torch.Tensor:
    """Return [num_last, V] float32 logits of a text's last tokens, computed without a cache.

    If rotary factors change within the text, its last tokens are fed one at a time instead.
    """
    if model.rotary_lengths.threshold < len(text):
        return model.feed(FeedOneByOne(text, len(text) - num_last + 1))
    keep = {"logits_to_keep": num_last} if model.passes.keeps_logits else {}
    ids = torch.tensor([text], device=model.device)
    return model.model(input_ids=ids, use_cache=False, **keep).logits[0, -num_last:].float()
