"""Runner for models that cannot be fed a token tree but can continue any text, e.g. Mamba.

If layers carry a state from token to token, each token's result depends on all tokens fed before it. So a replica feeds
a single path of the tree, as plain text. The states are saved before the guesses and restored unless all guesses are
accepted. Accepted tokens whose states were discarded become pending and are fed again.

Letters: T tokens fed, n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.model.attention.mask import LayerMasks, MaskBuilder
from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.kv_cache.states import StateCache
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.support import check_chain_family
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.tensors import tensor_on

# Tokens; a prompt of 512 takes 35 ms per layer in these, 53 ms in chunks of 256, 83 ms in chunks of 16.
MAX_CHUNK = 64
LIMIT, NO_LIMIT = "time_step_limit", (0.0, math.inf)  # attribute of a scanning layer, and the value without a limit


class FittedScans:
    """Model views for the state-space layers (Mamba 2, arXiv 2405.21060) of passes that continue a text.

    Their chunks are as short as a pass. Without CUDA kernels transformers pads a text to whole chunks, of 256 tokens
    for most models, and computes matrices of chunk x chunk for every head: 26 ms per layer for a step of 8 tokens,
    compared with 1 ms in a chunk of 8 (32 heads, 2 cores of an AMD EPYC). The chunk size changes the result by rounding
    only. On a GPU the kernels choose their own chunks.

    In chains, time steps have no limits. transformers applies those of the configuration in passes of several tokens
    only, that is, to a prompt and not to the tokens that `generate` feeds one by one.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        sizes = [module.chunk_size for module in _scanning(model)] if model.device.type == "cpu" else []
        self._own_chunk = max(sizes, default=0)
        self.limit_steps = any(tuple(getattr(each, LIMIT, NO_LIMIT)) != NO_LIMIT for each in _scanning(model))
        self._views: dict[tuple[int, bool], PreTrainedModel] = {}

    def model_for(self, num_tokens: int, is_chain: bool = False) -> PreTrainedModel:
        """Return the view that runs passes of T tokens per text, or the model itself."""
        chunk = min(MAX_CHUNK, 1 << (num_tokens - 1).bit_length(), self._own_chunk)
        frees_steps = is_chain and self.limit_steps
        if chunk == self._own_chunk and not frees_steps:
            return self._model
        if (chunk, frees_steps) not in self._views:
            view = view_of(self._model)
            for module in _scanning(view):
                module.chunk_size = min(chunk or module.chunk_size, module.chunk_size)
                if frees_steps:
                    setattr(module, LIMIT, NO_LIMIT)
            self._views[chunk, frees_steps] = view
        return self._views[chunk, frees_steps]


def _scanning(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if type(getattr(module, "chunk_size", None)) is int]


class ChainPasses(Passes):
    """Passes for a model that builds its own masks and may derive positions from its cache."""

    can_refeed = False  # a state cannot be taken back

    def __init__(self, model: PreTrainedModel, masks: MaskBuilder):
        super().__init__(model, masks, None)
        self._accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.scans = FittedScans(model)

    @torch.inference_mode()
    def logits_of_texts(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits of the last token of each of n texts of equal length, [n, V]."""
        ids = torch.tensor(texts, dtype=torch.int64, device=self.device)
        logits: torch.Tensor = self.scans.model_for(ids.shape[1])(input_ids=ids, use_cache=False).logits[:, -1]
        return logits

    def _model_for(self, num_tokens: int) -> PreTrainedModel:
        return self.scans.model_for(num_tokens)

    def _inputs(self, positions: torch.Tensor, mask: LayerMasks | None, cache: object) -> dict[str, object]:
        inputs: dict[str, object] = {self.cache_name: cache}
        return inputs | ({"position_ids": positions[None]} if self._accepts_positions else {})


class FeedChain(NamedTuple):
    """Feeds T tokens after the cache as `generate` feeds its new tokens; returns logits of `rows`, [n, V]."""

    tokens: Sequence[int]
    rows: Sequence[int]

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        assert isinstance(passes, ChainPasses)
        (cache,), device = caches, passes.device
        ids = tensor_on(device, self.tokens)
        positions = torch.arange(cache.length, cache.length + len(ids), device=device)
        view = passes.scans.model_for(len(ids), is_chain=True)
        return passes.forward(ids, positions, None, cache, tensor_on(device, self.rows), view)


class ChainRunner(ModelRunner):
    """A Hugging Face causal LM that is fed one path of a tree per step, and its slots."""

    feeds_chains = True
    passes: ChainPasses

    def __init__(self, model: PreTrainedModel, prefill_chunk: int):
        super().__init__(model, prefill_chunk)
        self._config: PreTrainedConfig = model.config.get_text_config(decoder=True)

    def _check_family(self, model: PreTrainedModel) -> None:
        check_chain_family(model)

    def _make_masks(self, config: PreTrainedConfig, attention: str) -> MaskBuilder:
        return MaskBuilder(PreTrainedConfig(), attention, self.dtype, self.device)  # the model makes its own

    def _make_passes(self, model: PreTrainedModel, masks: MaskBuilder, strict_tokens: int | None) -> ChainPasses:
        return ChainPasses(model, masks)

    def _make_cache(self, capacity: int) -> TreeCache:
        return StateCache(self._config, capacity)

    @property
    def prefix_unit(self) -> int | None:
        return 1 if self.passes.scans.limit_steps else None  # states after a chain are not those of a prompt

    @property
    def min_rest(self) -> int:
        return 2 if self.passes.scans.limit_steps else 1  # a single token has a time step without limits

    def cut(self, prompt: Sequence[int], size: int) -> list[Sequence[int]]:
        """Cut a prompt into chunks; the last one has several tokens, since a single one is fed as a new token is."""
        chunks = super().cut(prompt, size)
        if len(chunks) > 1 and len(chunks[-1]) == 1 and size > 2:
            chunks[-2:] = chunks[-2][:-1], prompt[-2:]
        return chunks

    @torch.inference_mode()
    def resume(self, slot: CacheSlot, prompt: Sequence[int], committed: Sequence[int], capacity: int) -> Iterator[None]:
        tokens = [*prompt, *committed[:-1]]
        num_known = slot.num_known(tokens, len(prompt), self.rotary_lengths)
        is_same_prefill = self.prefix_unit is None or slot.num_prefilled == min(len(prompt), len(slot.tokens))
        # A state cannot be truncated: the slot is reused only if all of it is a prefix of the wanted text.
        num_left = len(prompt) - len(slot.tokens)
        can_feed_rest = num_left <= 0 or num_left >= self.min_rest
        if not slot.tokens or num_known < len(slot.tokens) or not (is_same_prefill and can_feed_rest):
            self.begin(slot, capacity, prompt_length=len(prompt))
        else:
            _states(slot).roll_back()
            slot.undecided, slot.prompt_length = [], len(prompt)
            if slot.capacity < self.padded_capacity(capacity):
                slot.cache.grow(self.padded_capacity(capacity))
        if rest := prompt[len(slot.tokens) :]:
            yield from self.prefill_in_chunks(slot, rest)
        for chunk in super().cut(tokens[len(slot.tokens) :], self.prefill_chunk):
            yield
            self.feed(FeedChain(chunk, [0]), [slot.cache])
            slot.commit(chunk)
            self.num_prefilled_tokens += len(chunk)

    @torch.inference_mode()
    def logits_after_each(self, slot: CacheSlot, branches: Sequence[Sequence[int]], text: Sequence[int]) -> StepLogits:
        """Return the logits after n branches, each appended to a text; they are fed as a batch, without the slot."""
        return StepLogits(self.passes.logits_of_texts([[*text, *branch] for branch in branches]))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, commit: bool = True, any_size: bool = False) -> StepLogits:
        """Feed a share: pending tokens from `inputs.start` on, and one path of guesses below them.

        `commit` is whether certain tokens stay in the slot; False if another share of the same tree follows.
        """
        slot, tree, nodes, wanted, start = inputs
        nodes, wanted = np.asarray(nodes), np.asarray(wanted)
        cache = _states(slot)
        self._settle(slot, cache, len(slot.tokens) if start is None else start)
        self._ensure_capacity(slot, len(nodes))
        fed = tree.arrays()[0][nodes]
        are_certain = commit and int(nodes[-1]) <= tree.root
        if not are_certain:
            cache.save_states()
        rows = np.searchsorted(nodes, wanted)
        logits = self.feed(FeedChain(fed.tolist(), rows.tolist()), [cache])
        slot.undecided = fed.tolist() if commit else []
        if are_certain:
            _keep(slot)
        elif not commit:
            cache.roll_back()
        return StepLogits(logits)

    def _settle(self, slot: CacheSlot, cache: StateCache, start: int) -> None:
        """Commit or undo what was fed last, so that the slot holds `start` tokens."""
        if slot.undecided and start == len(slot.tokens) + len(slot.undecided):
            _keep(slot)
        elif slot.undecided:
            cache.roll_back()
            slot.undecided = []
        assert start == len(slot.tokens), f"{start} tokens are committed, and {len(slot.tokens)} held"


def _keep(slot: CacheSlot) -> None:
    slot.commit(slot.undecided)
    slot.undecided = []


def _states(slot: CacheSlot) -> StateCache:
    assert isinstance(slot.cache, StateCache)
    return slot.cache
