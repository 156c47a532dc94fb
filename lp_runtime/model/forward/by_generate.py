"""Logits of a text by the model's own `generate`: what the self-check compares with.

Letters: n tokens whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.utils.tensors import tensor_on


class FeedByGenerate(NamedTuple):
    """Computes [n, V] float32 logits by the model's `generate`: of tokens[start - 1] and all later tokens.

    `generate` feeds the first `start` tokens together, then one at a time. It chooses the cache and the inputs.
    """

    tokens: Sequence[int]
    start: int

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        model: Any = copy.copy(passes.plain_model())
        model.generation_config = GenerationConfig()  # the model's may end the text early, or choose another mode
        # Not the model's override, if there is one: that of Janus drops processors.
        output: Any = GenerationMixin.generate(
            model,
            tensor_on(passes.device, self.tokens[: self.start])[None],
            generation_config=GenerationConfig(
                max_new_tokens=len(self.tokens) - self.start + 1,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            ),
            logits_processor=LogitsProcessorList([_Forced(self.tokens)]),
        )
        return torch.cat(output.logits)


class _Forced(LogitsProcessor):
    """Lets `generate` choose the tokens of a given text, and any token after its end."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        scores = torch.zeros_like(scores)
        if length < len(self._tokens):
            scores[:, self._tokens[length]] = 1
        return scores
