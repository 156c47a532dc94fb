"""Forward passes of any size and of fixed sizes, from host data: token ids, positions, parents.

A pass is a value (`Pass`) that can be sent to another process, which runs it on its slice of the model.
Letters: T tokens fed, n nodes whose successors are wanted, B tokens of a strict pass, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from lp_runtime.kernels.dispatch import on
from lp_runtime.model.attention.mask import LayerMasks, MaskBuilder
from lp_runtime.model.attention.strict import BLOCK, KEYS, POSITION, WINDOW, tail_table
from lp_runtime.model.attention.strict import NAME as STRICT
from lp_runtime.model.forward.cuda_graph import GraphOptions, PassSet, PassSize
from lp_runtime.model.forward.inputs import InputLayout, concatenated, rounding_of
from lp_runtime.model.forward.pass_inputs import Part
from lp_runtime.model.hf.config import forward_options, has_latents
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.kv_cache.batch import BatchedCache
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.cache_names import CACHE_NAMES, cache_name
from lp_runtime.model.modules.rotary import library_view, replace_rotaries, view_for_length
from lp_runtime.sampling.sampler import sample_greedily
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.tensors import tensor_on

NOTHING = torch.empty(0)  # result of work that computes no logits: `run` returns a tensor


class Pass(Protocol):
    """A forward pass, or other work on a replica's model. All shards run it; it can be pickled."""

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        """Run it; `caches`, one per sequence, receive the keys and values. Returns logits, usually [n, V]."""


class Feed(Protocol):
    """Runs a pass on all shards of a replica: ModelRunner.feed."""

    def __call__(self, work: Pass, caches: Sequence[TreeCache] = ()) -> torch.Tensor: ...


class Passes:
    """A model that runs passes: of any size, and of fixed sizes after `BeginFixed`.

    Every pass writes keys and values after the tokens in its caches, and commits nothing. Rotary embeddings whose
    factors change with the text length are replaced permanently (modules/rotary.py).
    """

    can_refeed = True  # whether the caller can feed a whole text again at the length at which `generate` does

    def __init__(self, model: PreTrainedModel, masks: MaskBuilder, strict_tokens: int | None):
        self._model = model
        self.masks = masks
        self.device = model.device
        self.strict_tokens = strict_tokens
        # The text lengths at which the model's rotary factors change.
        self.lengths = replace_rotaries(model, may_refeed=self.can_refeed and strict_tokens is None)
        self.made: PassSet | None = None  # passes of fixed sizes; None before `BeginFixed`
        self._view_at: tuple[int, PreTrainedModel] = (0, model)  # the last prompt length, and the view for it
        # The model that trees are fed to; with `strict_tokens` a view of `model`.
        self.tree_model = model if strict_tokens is None else view_of(model, STRICT)
        # Whether the model's forward accepts `logits_to_keep`, to compute the wanted logits only.
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.has_latents = has_latents(model.config)
        self.cache_name = cache_name(model) or CACHE_NAMES[0]  # keyword by which the model's forward accepts a cache

    @property
    def are_captured(self) -> bool:
        """Whether passes of fixed sizes are captured, so that they allocate nothing."""
        return self.made is not None and self.made.options.capture

    def run(self, work: Pass, caches: Sequence[TreeCache]) -> torch.Tensor:
        with torch.inference_mode():  # a decorator takes twice as long
            return work.run(self, caches)

    def step_logits(self, logits: torch.Tensor, feed: Feed, presampled: torch.Tensor | None = None) -> StepLogits:
        """Return the logits of a tree pass in the form that sampling uses; `feed` runs further passes.

        `presampled` are the samples, [n, width], of a pass of a fixed size.
        """
        return StepLogits(logits, presampled, is_reused=presampled is not None)

    def sample(self, logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
        """Return the packed greedy samples, [n, width], of logits [n, V]; runs inside passes of fixed sizes."""
        return sample_greedily(logits, kernels)

    def keeping(self, rows: torch.Tensor | int) -> dict[str, object]:
        """Return the keyword arguments of a forward that only computes the logits of `rows`, if the model can."""
        return forward_options(self._model) | ({"logits_to_keep": rows} if self.keeps_logits else {})

    def plain_model(self) -> PreTrainedModel:
        return library_view(self._model) if self.lengths.change else self._model

    def model_at(self, rope_length: int) -> PreTrainedModel | None:
        """Return a view with the rotary factors of a text of `rope_length` tokens; None if that is 0."""
        if rope_length and rope_length != self._view_at[0]:
            self._view_at = rope_length, view_for_length(self._model, rope_length)
        return self._view_at[1] if rope_length else None

    def _model_for(self, num_tokens: int) -> PreTrainedModel:
        """Return the model, or an equivalent view of it that is faster for T tokens."""
        return self._model

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: LayerMasks | None,
        cache: object,
        rows: torch.Tensor | int,
        view: PreTrainedModel | None = None,
    ) -> torch.Tensor:
        """Run the model, or a view of it, on [T] tokens; return [n, V] logits of rows [n], or the last n."""
        arguments = self.keeping(rows) | self._inputs(positions, mask, cache)
        with on(self.device):
            run = view or self._model_for(len(ids))
            logits: torch.Tensor = run(input_ids=ids[None], use_cache=True, **arguments).logits[0]
        if not self.keeps_logits:
            logits = logits[-rows:] if isinstance(rows, int) else logits[rows]
        return logits

    def _inputs(self, positions: torch.Tensor, mask: LayerMasks | None, cache: object) -> dict[str, object]:
        inputs: dict[str, object] = {"position_ids": positions[None], "attention_mask": mask, self.cache_name: cache}
        return inputs | ({"batch": cache} if isinstance(cache, BatchedCache) else {})


class FeedChunk(NamedTuple):
    """Feeds T tokens of a text after the cache; returns logits of `rows`, or of the last token, [n, V]."""

    tokens: Sequence[int]
    rows: Sequence[int] | None = None
    rope_length: int = 0  # text length whose rotary factors the pass must use; 0 if each token uses its own

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        (cache,), device = caches, passes.device
        start = cache.length
        positions = torch.arange(start, start + len(self.tokens), device=device)
        mask = passes.masks.build_chunk(positions, start)
        kept = 1 if self.rows is None else tensor_on(device, self.rows)
        ids = tensor_on(device, self.tokens)
        return passes.forward(ids, positions, mask, cache, kept, passes.model_at(self.rope_length))


class FeedShare(NamedTuple):
    """Feeds a share of a tree; returns the logits of the wanted rows, [n, V].

    With exactness=strict it takes several passes of `strict_tokens` each.
    """

    layout: InputLayout
    rope_length: int = 0  # as in FeedChunk; strict models never re-feed a text, so they ignore it
    is_strict: bool = True  # with exactness=strict; False for one faster pass, with other rounding

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        (cache,), layout, device = caches, self.layout, passes.device
        if passes.strict_tokens is not None and self.is_strict:
            return self._run_strictly(passes, cache, passes.strict_tokens)[tensor_on(device, layout.rows)]
        ids, positions = tensor_on(device, np.stack([layout.tokens, layout.positions]))
        mask = passes.masks.build(layout.parents, positions, cache.length)
        num_rows = len(layout.rows)
        are_last = num_rows > 0 and layout.rows[0] == len(layout.tokens) - num_rows
        rows = num_rows if are_last else tensor_on(device, layout.rows)
        return passes.forward(ids, positions, mask, cache, rows, passes.model_at(self.rope_length))

    def _run_strictly(self, passes: Passes, cache: TreeCache, size: int) -> torch.Tensor:
        """Return the logits of all T tokens, [T, V], from passes of `size` tokens each, the last one padded."""
        logits = []
        for ids, positions, mask in _strict_inputs(self.layout, size, cache.length, passes.masks, passes.device):
            logits.append(passes.forward(ids, positions, mask, cache, size, passes.tree_model))
            cache.keep_writing(size)
        return torch.cat(logits)[: len(self.layout.tokens)]


def _strict_inputs(
    layout: InputLayout, size: int, num_cached: int, masks: MaskBuilder, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, LayerMasks]]:
    """Yield (ids [B], positions [B], masks) of passes of B = `size` tokens each; the last one is padded.

    Masks are tables from `tail_table` for strict_attention, by kind of layer if the model has several.
    """
    # Padding is at position 0 and sees the first committed token, so that its results are finite.
    num_padding = -len(layout.tokens) % size
    tables: dict[int, torch.Tensor] = {}  # by window
    for window, _ in set(masks.limits_by_kind.values()):
        table = tail_table(num_cached, layout.parents, window)
        padding = np.full((num_padding, table.shape[1]), -1, dtype=np.int64)
        padding[:, [POSITION, WINDOW, KEYS + BLOCK]] = 0
        tables[window] = tensor_on(device, np.concatenate([table, padding]))
    inputs = np.pad(np.stack([layout.tokens, layout.positions]), ((0, 0), (0, num_padding)))
    ids, positions = tensor_on(device, inputs)
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        by_kind = {kind: tables[window][rows][None, None] for kind, (window, _) in masks.limits_by_kind.items()}
        yield ids[rows], positions[rows], by_kind if masks.by_kind else next(iter(by_kind.values()))


class FeedShares(NamedTuple):
    """Feeds several sequences' shares in one pass; returns the logits of their wanted rows, [n, V]."""

    layouts: Sequence[InputLayout]

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        layouts, device = self.layouts, passes.device
        sizes = [len(layout.tokens) for layout in layouts]
        num_padding = -sum(sizes) % rounding_of(sum(sizes)) if device.type == "cpu" else 0
        ids, positions, rows = (tensor_on(device, each) for each in concatenated(layouts, num_padding))
        masks = [
            passes.masks.build(layout.parents, tensor_on(device, layout.positions), cache.length)
            for layout, cache in zip(layouts, caches, strict=True)
        ]
        batched = BatchedCache(caches, sizes, masks, num_padding, passes.has_latents)
        return passes.forward(ids, positions, batched.mask, batched, rows)


class FeedFixed(NamedTuple):
    """Feeds several sequences' shares in the pass of a fixed size, already made; returns [n, V] logits."""

    size: PassSize
    pieces: Sequence[tuple]  # each a Part without its cache, which is in `caches`

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        assert passes.made is not None
        parts = [Part(cache, *piece) for cache, piece in zip(caches, self.pieces, strict=True)]
        return passes.made.run(self.size, parts)


TREE_PASSES = (FeedShare, FeedShares, FeedFixed)


class FeedText(NamedTuple):
    """Computes the logits of a text's last tokens, [num_last, V], by the model without a cache."""

    tokens: Sequence[int]
    num_last: int

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        ids = tensor_on(passes.device, self.tokens)[None]
        positions = torch.arange(len(self.tokens), device=passes.device)[None]
        keeping = passes.keeping(self.num_last)
        output = passes.plain_model()(input_ids=ids, position_ids=positions, use_cache=False, **keeping)
        return output.logits[0, -self.num_last :]


class Pretend(NamedTuple):
    """Fills the cache to `length` tokens with its first token's keys and values, to time long contexts."""

    length: int

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        (cache,) = caches
        cache.repeat_first(self.length)
        return NOTHING


class BeginFixed(NamedTuple):
    """Prepares passes of fixed sizes; `MakeFixed` makes them."""

    options: GraphOptions

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        is_strict = passes.strict_tokens is not None
        passes.made = PassSet(
            passes.tree_model,
            passes.masks,
            self.options,
            passes.keeps_logits,
            passes.cache_name,
            passes.sample,
            is_strict,
        )
        return NOTHING


class MakeFixed(NamedTuple):
    """Makes the pass of a fixed size; raises what PassSet.make raises."""

    size: PassSize

    @torch.inference_mode(False)  # its buffers are also written outside inference mode
    @torch.no_grad()
    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        assert passes.made is not None
        passes.made.make(self.size)
        return NOTHING


class EmptyCache(NamedTuple):
    """Gives the memory that torch keeps, but no tensor uses, back to the GPU."""

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        if passes.device.type == "cuda":
            torch.cuda.empty_cache()
        return NOTHING


class EndFixed(NamedTuple):
    """Drops the passes of fixed sizes and frees their memory."""

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        passes.made = None
        return EmptyCache().run(passes, caches)
