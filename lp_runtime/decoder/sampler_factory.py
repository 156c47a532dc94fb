"""Factory of samplers: combines a request's settings with the model's defaults."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import replace

from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.grammar_mask import with_grammar_mask
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.hf_settings import build_processors
from lp_runtime.sampling.processors import TreeProcessors, is_ordered
from lp_runtime.sampling.request_processors import penalties_of
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.types import LogitsProcessor

MAX_PLAIN_KINDS = 1 << 10  # remembered kinds of requests; bounds the memory of a server


def make_sampler(model: ModelRunner, request: Request, plain_kinds: set[Hashable] | None = None) -> Sampler:
    """Return the sampler of a request, equal on all replicas, before it is asked for top-k candidates.

    `plain_kinds` caches the kinds of requests that need no logits processors, because asking transformers takes
    milliseconds. It is updated here; None for no cache.
    """
    sampling, length, ends = request.sampling, request.max_new_tokens, request.eos_token_ids
    defaults = model.model.generation_config.to_dict()
    kind = None if request.processors else repr((replace(sampling, seed=None), length, sorted(ends), defaults))
    processors: Sequence[LogitsProcessor] = ()
    if plain_kinds is None or kind not in plain_kinds:
        own: Sequence[LogitsProcessor] = request.processors
        if any(map(is_ordered, own)):  # they keep state, and a retry of the request must start fresh
            own = copy.deepcopy(own)
        own = (*penalties_of(sampling, len(request.prompt_ids)), *own)
        processors = build_processors(model.model, request.prompt_ids, sampling, length, ends, own)
        if plain_kinds is not None and kind is not None and not processors and len(plain_kinds) < MAX_PLAIN_KINDS:
            plain_kinds.add(kind)
    return sampler_of(processors, model, request, sampling.samples(defaults), reports=True)


def sampler_of(
    processors: Sequence[LogitsProcessor], model: ModelRunner, request: Request, samples: bool, reports: bool = False
) -> Sampler:
    """Return a sampler with these logits processors, and with noise if the request `samples`.

    `reports` is whether a processor's exceptions are the request's fault, see TreeProcessors.
    """
    if request.constraint is not None:
        processors = with_grammar_mask(processors)
    noise = None
    if samples:
        assert request.sampling.seed is not None, "a request that samples has a seed"
        noise = GumbelNoise(request.sampling.seed, request.sample, model.vocabulary_size, model.device)
    tree_processors = TreeProcessors(processors, model.device, reports)
    return Sampler(tree_processors, noise, request.logprobs, num_top_logprobs=request.top_logprobs)
