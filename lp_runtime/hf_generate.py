"""Lookahead decoding inside transformers: a callable for `model.generate(..., custom_generate=lookahead_generate)`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext, started_by_torchrun
from lp_runtime.distributed.exchange import broadcast_object, gather_rows, merge_rows
from lp_runtime.distributed.process_group import existing_or_new_group
from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.output import Report
from lp_runtime.engine.request import Request
from lp_runtime.errors import ConfigError, RequestError, first_line
from lp_runtime.lookahead.state import Stop
from lp_runtime.model.generate_call import GenerateCall, fit_for_trees
from lp_runtime.model.hf_config import attention_settings
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.self_check import check_model
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler

# What is known of a model since an earlier call: how it has passed the self-check, and what was measured of it. Nothing
# but time hangs on it.
_known: weakref.WeakKeyDictionary[Any, dict[tuple, dict]] = weakref.WeakKeyDictionary()


def lookahead_generate(
    model,
    input_ids: torch.Tensor,
    logits_processor: Sequence,
    stopping_criteria: Sequence,
    generation_config,
    W: int | None = None,
    N: int | None = None,
    G: int | None = None,
    lookahead: LookaheadConfig | None = None,
    seed: int | None = None,
    share_ranks: bool = True,
    exactness: str = "fast",
    strict_tokens: int = RuntimeConfig.strict_tokens,
    **model_kwargs: Any,
):
    """Decode as `generate` would, in fewer steps.

        model.generate(**inputs, custom_generate=lookahead_generate, max_new_tokens=128)

    Greedy search and sampling, with everything that `generate` prepares for them: generation configs, logits
    processors, stopping criteria, streamers, padded batches (each row is decoded as if alone, one after the other),
    `return_dict_in_generate` with `output_scores` and `output_logits`. Greedy output is `generate`'s own; samples are
    drawn from the same distribution, but with noise of ours: one seed gives one output at any W, N, G and number of
    ranks. Under torchrun all ranks make the same call and share its work.

    Args:
        model: loaded by the caller; it is left as it was found.
        input_ids: [B, L].
        logits_processor, stopping_criteria, generation_config, model_kwargs: from `generate`.
        W, N, G: see LookaheadConfig; if none is given, every step's size is chosen by what pays on this machine.
        lookahead: a whole LookaheadConfig instead of W, N and G; its draft_tables must be "request".
        seed: of the samples, 0 to 2**64 - 1: a row is sampled as if alone with this seed, and rows with the same
            prompt are independent samples of it. Default: drawn from torch's generator, so `torch.manual_seed` counts;
            all rows are then independent.
        exactness, strict_tokens: see RuntimeConfig.
        share_ranks: False where torchrun's ranks decode different prompts, each its own.

    Returns:
        What `generate` returns: [B, L + new tokens] token ids, or an output object.

    Raises:
        ConfigError, RequestError: if something is asked for that cannot be done, or a setting is out of range.
        ModelError: if the model fails the self-check, which is made at its first call.
    """
    if lookahead is None:
        lookahead = LookaheadConfig(W=W, N=N, G=G)
    elif (
        not isinstance(lookahead, LookaheadConfig)
        or (W, N, G) != (None, None, None)
        or lookahead.draft_tables != "request"
    ):
        raise ConfigError(
            f"lookahead={lookahead}: must be a LookaheadConfig with draft_tables=request, without W, N, G beside it"
        )
    RuntimeConfig(lookahead=lookahead, exactness=exactness, strict_tokens=strict_tokens)  # checks them
    sampling = SamplingConfig(seed=seed)
    call = GenerateCall(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    with fit_for_trees(model), _ranks(model.device, share_ranks) as (context, exchange_device):
        tree_model = ModelRunner(model, ModelConfig.prefill_chunk, strict_tokens if exactness == "strict" else None)
        kind = (tree_model.strict_tokens, tree_model.dtype, str(attention_settings(model)), context.num_replicas)
        known = _known.setdefault(model, {})
        if kind not in known:
            check_model(tree_model)
            known[kind] = {}
        was_measured = np.array([len(known[kind])], dtype=np.int64)
        if len(set(gather_rows(was_measured, context.num_replicas, exchange_device).ravel().tolist())) > 1:
            known[kind] = {}  # some rank is new, or has another past: all measure again
        calibration = Calibration(
            tree_model, context.rank, context.num_replicas, exchange_device, RuntimeConfig.cache_dir, known[kind]
        )
        if call.do_sample and seed is None:
            drawn = int(torch.randint(2**63 - 1, ()))
            sampling.seed = broadcast_object(drawn, context.rank, context.num_replicas, exchange_device)
            call.samples = list(range(len(call.rows)))
        rows = _Rows(call, tree_model, context, exchange_device, lookahead, sampling, calibration)
        return rows.decode()


@contextmanager
def _ranks(device: torch.device, share_ranks: bool) -> Iterator[tuple[ReplicaContext, torch.device]]:
    if share_ranks and started_by_torchrun():
        with existing_or_new_group(device, LauncherConfig.timeout) as found:
            yield found
    else:
        yield ReplicaContext(owns_process=False), device


class _Rows:
    """The rows of a call, decoded one after the other."""

    def __init__(
        self,
        call: GenerateCall,
        model: ModelRunner,
        context: ReplicaContext,
        exchange_device: torch.device,
        lookahead: LookaheadConfig,
        sampling: SamplingConfig,
        calibration: Calibration,
    ):
        self._call = call
        self._model = model
        self._context = context
        self._exchange_device = exchange_device
        self._lookahead = lookahead
        self._sampling = sampling
        self._loop = Engine(model, context.rank, context.num_replicas, exchange_device, calibration)

    def decode(self):
        call = self._call
        tokens, scores, logits = [], [], []
        for row in range(len(call.rows)):
            recorder = _Recorder(self._model.vocabulary_size)
            tokens.append(self._decode_row(row, recorder))
            for wanted, kept, into in (
                (call.wants_scores, recorder.scores, scores),
                (call.wants_logits, recorder.logits, logits),
            ):
                if wanted:
                    merged = torch.stack(kept[: len(tokens[-1])])
                    into.append(merge_rows(merged, self._context.num_replicas, self._exchange_device))
        if call.streamer is not None:
            call.streamer.end()
        return call.output(tokens, scores if call.wants_scores else None, logits if call.wants_logits else None)

    def _decode_row(self, row: int, recorder: _Recorder) -> list[int]:
        call, model = self._call, self._model
        prompt = call.rows[row]
        context_length = model.context_length
        if context_length is not None and len(prompt) + call.max_new_tokens > context_length:
            raise RequestError(
                f"the prompt is too long: {len(prompt)} tokens + {call.max_new_tokens} new ones are more than the"
                f" model's context of {context_length}"
            )
        request = Request(
            prompt_ids=prompt,
            lookahead=self._lookahead,
            max_new_tokens=call.max_new_tokens,
            eos_token_ids=call.eos_token_ids,
            sampling=self._sampling,
            sample=call.samples[row],
            max_time=call.time_left(),
        )
        noise = None
        if call.do_sample:
            noise = GumbelNoise(self._sampling.seed, request.sample, model.vocabulary_size, model.device)
        drawing = Sampler(TreeProcessors(call.processors(row), model.device), noise)
        observe = recorder if call.wants_scores or call.wants_logits else None
        new_tokens: list[int] = []
        for event in self._loop.run(request, drawing, self._stop(prompt), observe=observe):
            if not isinstance(event, Report):
                new_tokens += event.token_ids
                if call.streamer is not None:
                    for token in event.token_ids:
                        call.streamer.put(torch.tensor([token]))
        return new_tokens

    def _stop(self, prompt: Sequence[int]) -> Stop | None:
        """The caller's own criteria, asked after every token. Where ranks share the work, the first one asks them, and
        tells the others in a collective of its own: the tokens of this step must not be streamed before."""
        if not self._call.criteria:
            return None
        text = list(prompt)
        context = self._context

        def ask(run: Sequence[int]) -> int | None:
            for i, token in enumerate(run, start=1):
                text.append(token)
                if self._call.is_done(text):
                    return i
            return None

        def stop(run: Sequence[int]) -> int | None:
            answer: int | Exception | None = None
            if context.rank == 0:
                try:
                    answer = ask(run)
                except Exception as error:
                    if context.num_replicas == 1:
                        raise
                    answer = RequestError(f"a stopping criterion failed: {type(error).__name__}: {first_line(error)}")
            answer = broadcast_object(answer, context.rank, context.num_replicas, self._exchange_device)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return stop


class _Recorder:
    """Keeps the rows of logits and scores that committed tokens were drawn from; -inf where another rank has them."""

    def __init__(self, vocabulary_size: int):
        self._size = vocabulary_size
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def __call__(self, nodes: list[int], owned: list[int], logits: torch.Tensor, scores: torch.Tensor) -> None:
        place = {node: row for row, node in enumerate(owned)}
        for node in nodes:
            for kept, values in ((self.scores, scores), (self.logits, logits)):
                row = place.get(node)
                kept.append(values.new_full((self._size,), float("-inf")) if row is None else values[row].clone())
