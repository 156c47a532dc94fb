"""Factory of samplers: combines a request's settings with the model's defaults."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from lp_runtime.lookahead.drafter import NoiseKey
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.grammar_mask import with_grammar_mask
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.hf_settings import build_processors
from lp_runtime.sampling.processors import TreeProcessors, is_ordered
from lp_runtime.sampling.request_processors import penalties_of
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.truncation import temperature_of
from lp_runtime.sampling.types import LogitsProcessor

MAX_PLAIN_KINDS = 1 << 10  # remembered kinds of requests; bounds the memory of a server


@dataclass(frozen=True)
class SamplerSpec:
    """Sampling settings of a request. `build` adds the number of top-k candidates that the drafter needs.

    Attributes:
        noise: Gumbel noise of the sample; None for greedy decoding.
        temperature: value by which the processors divide the logits.
        num_top_logprobs: likeliest tokens per node that the exchange includes with their log-probabilities.
    """

    processors: TreeProcessors
    noise: GumbelNoise | None
    temperature: float = 1.0
    with_logprobs: bool = False
    num_top_logprobs: int = 0

    @property
    def noise_key(self) -> NoiseKey | None:
        """Key with which a drafter predicts the noise; None for greedy decoding."""
        return None if self.noise is None else NoiseKey(self.noise.seed, self.noise.sample, self.temperature)

    def build(self, num_top_k: int) -> Sampler:
        """Return a sampler that reports the `num_top_k` likeliest tokens of every node."""
        return Sampler(self.processors, self.noise, self.with_logprobs, num_top_k, self.num_top_logprobs)


def make_sampler_spec(model: ModelRunner, request: Request, plain_kinds: set[Hashable] | None = None) -> SamplerSpec:
    """Return the sampling settings of a request, equal on all replicas.

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
    if request.constraint is not None:
        processors = with_grammar_mask(processors)
    noise = None
    if sampling.samples(defaults):
        assert sampling.seed is not None, "a request that samples has a seed"
        noise = GumbelNoise(sampling.seed, request.sample, model.vocabulary_size, model.device)
    tree_processors = TreeProcessors(processors, model.device, reports=True)
    return SamplerSpec(tree_processors, noise, temperature_of(processors), request.logprobs, request.top_logprobs)
