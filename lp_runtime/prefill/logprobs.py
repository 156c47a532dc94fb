"""Prefill that also computes the log-probability of every prompt token.

Letters: n tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prompt_feeder import PromptFeeder
from lp_runtime.request.output import Logprob, StepOutput
from lp_runtime.sampling.logprobs import pack_top_logprobs, unpack_top_logprobs


class PromptScorer(PromptFeeder):
    """Feeds a prompt to an empty slot, and keeps each token's log-probability and the `num_top` likeliest ones."""

    chunk_tokens = 64  # bounds the [n, V] float32 logits, which are needed for every token

    def __init__(self, model: ModelRunner, slot: CacheSlot, prompt: Sequence[int], num_top: int):
        super().__init__(model, slot)
        self._prompt, self._num_top = prompt, num_top
        self._logprobs: list[Logprob] = []

    def feed(self, chunk: Sequence[int]) -> torch.Tensor:
        start = len(self._slot.tokens)
        logits = self._model.feed_prompt(self._slot, chunk, range(len(chunk)))
        self._score(logits, self._prompt[start + 1 : start + len(chunk) + 1])
        return logits[-1:]

    def _score(self, logits: torch.Tensor, following: Sequence[int]) -> None:
        """Record the log-probabilities of tokens that follow the first rows of the [n, V] logits."""
        if not following:
            return
        logits = logits[: len(following)]
        tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
        values = (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
        top = unpack_top_logprobs(pack_top_logprobs(logits, self._num_top).cpu().numpy())
        self._logprobs += [Logprob(value, each) for value, each in zip(values, top, strict=True)]

    def attach(self, output: StepOutput) -> StepOutput:
        """Return the prefill's output with the prompt's log-probabilities attached to the first new token's."""
        assert output.logprobs is not None  # RequestBuilder asks for both or neither
        first, *rest = output.logprobs
        top = first.top if isinstance(first, Logprob) else ()
        return replace(output, logprobs=[Logprob(first, top, tuple(self._logprobs)), *rest])
