"""Log-probabilities of a prompt's tokens, from a prefill that keeps the logits of all of them.

Letters: n tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Logprob, StepOutput
from lp_runtime.sampling.logprobs import pack_top_logprobs, unpack_top_logprobs
from lp_runtime.utils.generators import result_of

SCORED_TOKENS = 64  # fed at once: the logits of all are wanted, [n, V] float32


class PromptScorer:
    """Feeds a prompt and notes how likely the model finds each of its tokens.

    Args:
        model: this replica's.
        slot: has begun, and is empty.
        prompt: token ids, at least one.
        num_top: how many of the likeliest tokens are noted for each place.
    """

    def __init__(self, model: ModelRunner, slot: CacheSlot, prompt: Sequence[int], num_top: int):
        self._model, self._slot, self._prompt, self._num_top = model, slot, prompt, num_top
        self._logprobs: list[Logprob] = []

    def prefill_in_chunks(self) -> Generator[None, None, torch.Tensor]:
        """Feed and commit the prompt, SCORED_TOKENS tokens at a time.

        Yields:
            None between chunks; other slots may be fed meanwhile.

        Returns:
            [1, V] float32 logits of the last token.
        """
        prompt = self._prompt
        for start in range(0, len(prompt), SCORED_TOKENS):
            if start:
                yield
            chunk = prompt[start : start + SCORED_TOKENS]
            logits = self._feed(chunk, is_first=start == 0)
            self._score(logits, prompt[start + 1 : start + len(chunk) + 1])
        return logits[-1:]

    def _feed(self, chunk: Sequence[int], is_first: bool) -> torch.Tensor:
        """Return the logits behind each token of a chunk, [n, V]; the slot's first token is fed alone, as a prompt."""
        first = []
        if is_first:
            first = [result_of(self._model.prefill_in_chunks(self._slot, chunk[:1]))]
            chunk = chunk[1:]
        if chunk:
            chain = TokenTree(list(chunk), max_depth=0)
            nodes = range(len(chain))
            first.append(self._model.forward(StepInputs(self._slot, chain, nodes, nodes)).logits)
            self._model.num_prefilled_tokens += len(chunk)
        return torch.cat(first)

    def _score(self, logits: torch.Tensor, following: Sequence[int]) -> None:
        """Note the log-probabilities of the tokens that follow the first rows of logits, [n, V]."""
        if not following:
            return
        logits = logits[: len(following)]
        tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
        values = (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
        top = unpack_top_logprobs(pack_top_logprobs(logits, self._num_top).cpu().numpy())
        self._logprobs += [Logprob(value, each) for value, each in zip(values, top, strict=True)]

    def attach(self, output: StepOutput) -> StepOutput:
        """Return the prefill's output, with the prompt's log-probabilities beside that of the first new token."""
        assert output.logprobs is not None  # RequestBuilder asks for both or neither
        first, *rest = output.logprobs
        top = first.top if isinstance(first, Logprob) else ()
        return replace(output, logprobs=[Logprob(first, top, tuple(self._logprobs)), *rest])
