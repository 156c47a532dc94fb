"""Forward passes of any size and of fixed sizes, from host data: token ids, positions, parents.

All arguments except the caches can be sent to another process, which runs the same pass on its slice of the model.
Letters: T tokens fed, n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lp_runtime.kernels.dispatch import on
from lp_runtime.model.attention.mask import LayerMasks, MaskBuilder
from lp_runtime.model.attention.strict import NAME as STRICT
from lp_runtime.model.forward.batch_inputs import batch_inputs
from lp_runtime.model.forward.cuda_graph import GraphOptions, PassSet, PassSize
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.model.forward.pass_inputs import Part
from lp_runtime.model.forward.strict_passes import strict_passes
from lp_runtime.model.hf.rotary_lengths import UNCHANGING, RotaryLengths
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.kv_cache.batch import BatchedCache
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.cache_names import CACHE_NAMES, cache_name
from lp_runtime.model.modules.rotary import library_view, view_for_length
from lp_runtime.sampling.sampler import sample_greedily
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.tensors import tensor_on

NOTHING = torch.empty(0)  # result of methods that compute no logits: `run` returns a tensor


class Passes:
    """Forward passes of a model: of any size, and of fixed sizes after `begin_fixed`.

    Every pass writes keys and values after the tokens in its caches, and commits nothing. Public methods that have
    `caches` as first argument can be run by name on all shards of a replica (following.py).

    Attributes:
        made: passes of fixed sizes; None before `begin_fixed`.
        tree_model: the model that trees are fed to; with `strict_tokens` a view of `model`.
        keeps_logits: whether the model's forward accepts `logits_to_keep`, to compute the wanted logits only.
        cache_name: keyword by which the model's forward accepts a cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: MaskBuilder,
        strict_tokens: int | None,
        lengths: RotaryLengths = UNCHANGING,
    ):
        self._model = model
        self._masks = masks
        self._device = model.device
        self.strict_tokens, self.lengths = strict_tokens, lengths
        self.made: PassSet | None = None
        self._prompt_view: tuple[int, PreTrainedModel] = (0, model)  # the last prompt length, and the view for it
        self.tree_model = model if strict_tokens is None else view_of(model, STRICT)
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.cache_name = cache_name(model) or CACHE_NAMES[0]

    @property
    def are_captured(self) -> bool:
        """Whether passes of fixed sizes are captured, so that they allocate nothing."""
        return self.made is not None and self.made.options.capture

    def run(self, kind: str, caches: Sequence[TreeCache], what: Sequence[object]) -> torch.Tensor:
        """Run the method `kind` with these caches and the further arguments `what`."""
        logits: torch.Tensor = getattr(self, kind)(caches, *what)
        return logits

    def step_logits(
        self, logits: torch.Tensor, feed: Callable[..., torch.Tensor], presampled: torch.Tensor | None = None
    ) -> StepLogits:
        """Return the logits of a tree pass in the form that sampling uses.

        `feed` is ModelRunner.feed, for further passes. A pass of a fixed size also has its samples, [n, width]:
        `presampled`.
        """
        return StepLogits(logits, presampled, is_reused=presampled is not None)

    @torch.inference_mode()
    def pretend(self, caches: Sequence[TreeCache], length: int) -> torch.Tensor:
        """Fill the cache to `length` tokens with its first token's keys and values, to time long contexts."""
        (cache,) = caches
        cache.repeat_first(length)
        return NOTHING

    def begin_fixed(self, caches: Sequence[TreeCache], options: GraphOptions) -> torch.Tensor:
        """Prepare passes of fixed sizes; `make_fixed` makes them. `caches` is empty."""
        is_strict = self.strict_tokens is not None
        self.made = PassSet(
            self.tree_model, self._masks, options, self.keeps_logits, self.cache_name, self._sample, is_strict
        )
        return NOTHING

    def end_fixed(self, caches: Sequence[TreeCache]) -> torch.Tensor:
        """Drop the passes of fixed sizes and free their memory. `caches` is empty."""
        self.made = None
        return self.empty_cache(caches)

    def empty_cache(self, caches: Sequence[TreeCache]) -> torch.Tensor:
        """Give the memory that torch keeps, but no tensor uses, back to the GPU. `caches` is empty."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return NOTHING

    @torch.no_grad()
    def make_fixed(self, caches: Sequence[TreeCache], size: PassSize) -> torch.Tensor:
        """Make the pass of a fixed size; raises what PassSet.make raises. `caches` is empty."""
        assert self.made is not None
        self.made.make(size)
        return NOTHING

    @torch.no_grad()
    def fixed(self, caches: Sequence[TreeCache], size: PassSize, pieces: Sequence[tuple]) -> torch.Tensor:
        """Run the pass of a fixed size on several sequences' shares; return the wanted rows' logits, [n, V].

        The pass has been made. Each piece is a Part without its cache, which is in `caches`.
        """
        assert self.made is not None
        return self.made.run(size, [Part(cache, *piece) for cache, piece in zip(caches, pieces, strict=True)])

    def _sample(self, logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
        """Return the packed greedy samples, [n, width], of logits [n, V]; runs inside passes of fixed sizes."""
        return sample_greedily(logits, kernels)

    @torch.inference_mode()
    def chunk(
        self, caches: Sequence[TreeCache], tokens: Sequence[int], rows: Sequence[int] | None = None, length: int = 0
    ) -> torch.Tensor:
        """Feed T tokens of a text after the cache; return the logits of `rows`, or of the last token, [n, V].

        `length` is the text length whose rotary factors the pass must use; 0 if each token uses its own.
        """
        (cache,) = caches
        start = cache.length
        positions = torch.arange(start, start + len(tokens), device=self._device)
        mask = self._masks.build_chunk(positions, start)
        kept = 1 if rows is None else tensor_on(self._device, rows)
        return self._forward(tensor_on(self._device, tokens), positions, mask, cache, kept, self._prompt_model(length))

    @torch.inference_mode()
    def each_alone(self, caches: Sequence[TreeCache], tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of T tokens, each fed alone as the next token after the cache, [T, V]."""
        (cache,) = caches
        ids = tensor_on(self._device, tokens)
        positions = torch.full_like(ids, cache.length)
        mask = self._masks.build([-1] * len(tokens), positions, cache.length)
        return self._forward(ids, positions, mask, cache, len(tokens))

    @torch.inference_mode()
    def share(self, caches: Sequence[TreeCache], layout: InputLayout, length: int = 0) -> torch.Tensor:
        """Return the logits of the wanted rows of a share of a tree, [n, V].

        With exactness=strict it takes several passes of `strict_tokens` each. `length` is as in `chunk`; strict models
        never re-feed a text, so they ignore it.
        """
        (cache,) = caches
        if self.strict_tokens is not None:
            return self._strict_forward(cache, layout, self.strict_tokens)[tensor_on(self._device, layout.rows)]
        ids, positions = tensor_on(self._device, np.stack([layout.tokens, layout.positions]))
        mask = self._masks.build(layout.parents, positions, cache.length)
        num_rows = len(layout.rows)
        are_last = num_rows > 0 and layout.rows[0] == len(layout.tokens) - num_rows
        rows = num_rows if are_last else tensor_on(self._device, layout.rows)
        return self._forward(ids, positions, mask, cache, rows, self._prompt_model(length))

    @torch.inference_mode()
    def shares(self, caches: Sequence[TreeCache], layouts: Sequence[InputLayout]) -> torch.Tensor:
        """Return the logits of the wanted rows of several sequences' shares, fed in one pass, [n, V]."""
        ids, positions, rows, batched = batch_inputs(caches, layouts, self._masks, self._device)
        return self._forward(ids, positions, batched.mask, batched, rows)

    @torch.inference_mode()
    def text(self, caches: Sequence[TreeCache], tokens: Sequence[int], num_last: int) -> torch.Tensor:
        """Return the logits of a text's last tokens, [num_last, V], computed by the model without a cache."""
        assert not caches
        ids = tensor_on(self._device, tokens)[None]
        positions = torch.arange(len(tokens), device=self._device)[None]
        output = self._plain()(input_ids=ids, position_ids=positions, use_cache=False, **self._keeping(num_last))
        return output.logits[0, -num_last:]

    @torch.inference_mode()
    def text_one_by_one(self, caches: Sequence[TreeCache], tokens: Sequence[int], start: int) -> torch.Tensor:
        """Return [n, V] float32 logits as `generate` computes them: of tokens[start - 1] and all later tokens.

        The first `start` tokens are fed together, then one at a time. `caches` is empty: the model makes its own cache.
        """
        assert not caches
        cache, model = None, self._plain()
        logits: list[torch.Tensor] = []
        for part in (tokens[:start], *([token] for token in tokens[start:])):
            ids = tensor_on(self._device, part)[None]
            first = start + len(logits) - 1 if logits else 0
            positions = torch.arange(first, first + len(part), device=self._device)[None]
            options: dict[str, Any] = {self.cache_name: cache} | self._keeping(1)
            output = model(input_ids=ids, position_ids=positions, use_cache=True, **options)
            cache = getattr(output, self.cache_name)
            logits.append(output.logits[0, -1].float())
        return torch.stack(logits)

    def _keeping(self, rows: torch.Tensor | int) -> dict[str, object]:
        """Return the keyword argument that limits the computed logits to `rows`; empty if the model has none."""
        return {"logits_to_keep": rows} if self.keeps_logits else {}

    def _plain(self) -> PreTrainedModel:
        """Return the model with transformers' own rotary modules."""
        return library_view(self._model) if self.lengths.change else self._model

    def _prompt_model(self, length: int) -> PreTrainedModel | None:
        """Return the view whose rotary factors are those of a prompt of `length` tokens; None if that is 0."""
        if length and length != self._prompt_view[0]:
            self._prompt_view = length, view_for_length(self._model, length)
        return self._prompt_view[1] if length else None

    def _model_for(self, num_tokens: int) -> PreTrainedModel:
        """Return the model, or an equivalent view of it that is faster for T tokens."""
        return self._model

    def _strict_forward(self, cache: TreeCache, layout: InputLayout, size: int) -> torch.Tensor:
        """Return the logits of all T tokens, [T, V], from passes of `size` tokens each, the last one padded."""
        logits = []
        for ids, positions, mask in strict_passes(layout, size, cache.length, self._masks, self._device):
            logits.append(self._forward(ids, positions, mask, cache, size, self.tree_model))
            cache.keep_writing(size)
        return torch.cat(logits)[: len(layout.tokens)]

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: LayerMasks | None,
        cache: object,
        rows: torch.Tensor | int,
        view: PreTrainedModel | None = None,
    ) -> torch.Tensor:
        """Run the model, or a view of it, on [T] tokens; return [n, V] logits of rows [n], or the last n."""
        arguments = self._keeping(rows) | self._inputs(positions, mask, cache)
        with on(self._device):
            run = view or self._model_for(len(ids))
            logits: torch.Tensor = run(input_ids=ids[None], use_cache=True, **arguments).logits[0]
        if not self.keeps_logits:
            logits = logits[-rows:] if isinstance(rows, int) else logits[rows]
        return logits

    def _inputs(self, positions: torch.Tensor, mask: LayerMasks | None, cache: object) -> dict[str, object]:
        """Return the keyword arguments of the model's forward except token ids; positions are [T]."""
        inputs: dict[str, object] = {"position_ids": positions[None], "attention_mask": mask, self.cache_name: cache}
        return inputs | ({"batch": cache} if isinstance(cache, BatchedCache) else {})
