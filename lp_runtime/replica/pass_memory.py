"""Start-up measurement of the GPU memory that passes need in addition to weights, keys and values.

A chunk of a prompt, with and without the logits of its tokens, and a step that samples with every setting that copies
logits, are run after a long dummy text. Their largest allocation may grow with the text (masks, scores), so two lengths
are measured.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from lp_runtime.calibration.step_meter import BRANCH_TOKENS, dummy_tree, make_greedy_sampler
from lp_runtime.config.lookahead import PLAIN, UNMEASURED_STEP_TOKENS
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.lookahead.top_k import K
from lp_runtime.model.capacity import PassBytes, free_bytes
from lp_runtime.model.forward.passes import Pretend
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.harvest import MAX_LOGITS
from lp_runtime.request.request import Request

log = logging.getLogger(__name__)

LONG_TOKENS = 1 << 14  # of the longer text
LONG_SHARE = 2  # the dummy text takes at most this part of the free memory: one half
SAMPLING = Request(
    (0,),
    PLAIN,
    max_new_tokens=1,
    sampling=SamplingConfig(temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=0),
    logprobs=True,
    top_logprobs=5,
)


def measure_pass_bytes(model: ModelRunner) -> PassBytes | None:
    """Measure the memory of passes on a GPU; None on a CPU, for chains, and if a chunk does not fit.

    The model has run a pass.
    """
    if model.device.type != "cuda" or model.feeds_chains:
        return None
    longest = min(model.context_length or sys.maxsize, model.rotary_lengths.threshold)
    num_step = min(UNMEASURED_STEP_TOKENS, max(1, longest // 4))
    num_chunk = max(1, min(model.prefill_chunk, longest // 2))
    affordable = (free_bytes(model.device) or 0) // LONG_SHARE // max(1, model.cache_bytes_per_token)
    long = min(LONG_TOKENS, affordable, longest) - max(num_chunk, num_step)
    num_prefilled = model.num_prefilled_tokens
    try:
        for length in (long, long // 8):
            if length < 2:
                break
            try:
                lengths = (length // 2, length)
                short_peak, long_peak = (_Meter(model, each, num_chunk, num_step).peak() for each in lengths)
            except torch.OutOfMemoryError:
                model.free_memory()
                continue
            per_token = max(0.0, (long_peak - short_peak) / (lengths[1] - lengths[0]))
            return PassBytes(max(0, int(long_peak - per_token * length)), per_token)
    finally:
        model.num_prefilled_tokens = num_prefilled
    log.warning("the memory that passes need on %s is not known: too little is free to measure it", model.device)
    return None


class _Meter:
    """Measures passes after a dummy text of `length` tokens, in a slot that is freed afterwards."""

    def __init__(self, model: ModelRunner, length: int, num_chunk: int, num_step: int):
        self._model, self._length = model, length
        self._num_chunk, self._num_step = num_chunk, num_step
        self._slot = CacheSlot()
        model.begin(self._slot, length + max(num_chunk, num_step))
        model.prefill(self._slot, [0])
        model.feed(Pretend(length), [self._slot.cache])

    def peak(self) -> int:
        """Return the most bytes that any of the passes has allocated."""
        return max(map(self._peak_of, (self._chunk, self._chunk_with_logits, self._step)))

    def _peak_of(self, run: Callable[[], None]) -> int:
        device, cache = self._model.device, self._slot.cache
        cache.place_at(self._length, 0)
        self._slot.tokens = [0] * self._length
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before

    def _chunk(self) -> None:
        self._model.feed_prompt(self._slot, [0] * self._num_chunk)

    def _chunk_with_logits(self) -> None:
        """Feed what PromptHarvest does of a prompt on one replica, and pack the candidates of all its tokens."""
        model = self._model
        num_tokens = max(1, min(self._num_chunk, MAX_LOGITS // model.vocabulary_size))
        logits = model.feed_prompt(self._slot, [0] * num_tokens, range(num_tokens))
        make_greedy_sampler(model).pack_candidates(logits)

    def _step(self) -> None:
        model, nodes = self._model, range(self._num_step)
        sampler = replace(make_sampler(model, SAMPLING), num_top_k=K)
        tree = dummy_tree(len(nodes), BRANCH_TOKENS, model.vocabulary_size)
        # With exactness=strict, fixed passes feed every step; otherwise a large step takes a pass of any size.
        logits = model.forward(StepInputs(self._slot, tree, nodes, nodes), any_size=model.strict_tokens is None)
        sampler.sample(logits, tree, nodes, [0] * self._length)
