"""Prefill that also computes the log-probability of every prompt token.

Letters: n tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import torch

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Logprob, StepOutput
from lp_runtime.sampling.logprobs import pack_top_logprobs, unpack_top_logprobs
from lp_runtime.utils.generators import result_of

SCORED_TOKENS = 64  # per pass: bounds the [n, V] float32 logits, which are needed for every token


@dataclass
class PromptScorer:
    """Prefill of a prompt that records each token's log-probability, and the `num_top` likeliest ones."""

    model: ModelRunner
    slot: CacheSlot  # begun and empty
    prompt: Sequence[int]
    num_top: int
    logprobs: list[Logprob] = field(default_factory=list)

    def prefill_in_chunks(self) -> Generator[None, None, torch.Tensor]:
        """Feed and commit the prompt; return the [1, V] float32 logits of the last token.

        Yields after every SCORED_TOKENS tokens, when other slots may be fed.
        """
        prompt = self.prompt
        for start in range(0, len(prompt), SCORED_TOKENS):
            if start:
                yield
            chunk = prompt[start : start + SCORED_TOKENS]
            logits = self._feed(chunk, is_first=start == 0)
            self._score(logits, prompt[start + 1 : start + len(chunk) + 1])
        return logits[-1:]

    def _feed(self, chunk: Sequence[int], is_first: bool) -> torch.Tensor:
        """Return the [n, V] logits at each token of a chunk; the slot's first token is fed alone, as a prompt."""
        parts = []
        if is_first:
            parts = [result_of(self.model.prefill_in_chunks(self.slot, chunk[:1]))]
            chunk = chunk[1:]
        if chunk:
            chain = TokenTree(list(chunk), max_depth=0)
            nodes = range(len(chain))
            parts.append(self.model.forward(StepInputs(self.slot, chain, nodes, nodes)).logits)
            self.model.num_prefilled_tokens += len(chunk)
        return torch.cat(parts)

    def _score(self, logits: torch.Tensor, following: Sequence[int]) -> None:
        """Record the log-probabilities of tokens that follow the first rows of the [n, V] logits."""
        if not following:
            return
        logits = logits[: len(following)]
        tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
        values = (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
        top = unpack_top_logprobs(pack_top_logprobs(logits, self.num_top).cpu().numpy())
        self.logprobs += [Logprob(value, each) for value, each in zip(values, top, strict=True)]

    def attach(self, output: StepOutput) -> StepOutput:
        """Return the prefill's output with the prompt's log-probabilities attached to the first new token's."""
        assert output.logprobs is not None  # RequestBuilder asks for both or neither
        first, *rest = output.logprobs
        top = first.top if isinstance(first, Logprob) else ()
        return replace(output, logprobs=[Logprob(first, top, tuple(self.logprobs)), *rest])
