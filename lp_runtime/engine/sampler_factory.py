"""How a request's successors are drawn, from what it and the model's own defaults say."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from lp_runtime.engine.request import Request
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.hf_settings import build_processors
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler

MAX_PLAIN_KINDS = 1 << 10


def make_sampler(model: ModelRunner, request: Request, plain_kinds: set[Hashable] | None = None) -> Sampler:
    """How a request's successors are drawn from this model's logits; alike on all replicas.

    Args:
        plain_kinds: kinds of requests whose logits nothing is done to, as far as is known, which is added to: to ask
            transformers takes milliseconds.

    Raises:
        ConfigError: if transformers refuses a setting.
    """
    sampling, length, ends = request.sampling, request.max_new_tokens, request.eos_token_ids
    defaults = model.model.generation_config.to_dict()
    kind = None if request.processors else repr((replace(sampling, seed=None), length, sorted(ends), defaults))
    processors: Sequence = ()
    if plain_kinds is None or kind not in plain_kinds:
        processors = build_processors(model.model, request.prompt_ids, sampling, length, ends, request.processors)
        if plain_kinds is not None and kind is not None and not processors and len(plain_kinds) < MAX_PLAIN_KINDS:
            plain_kinds.add(kind)
    noise = None
    if sampling.draws(defaults):
        noise = GumbelNoise(sampling.seed, request.sample, model.vocabulary_size, model.device)
    return Sampler(TreeProcessors(processors, model.device, reports=True), noise, request.logprobs)
