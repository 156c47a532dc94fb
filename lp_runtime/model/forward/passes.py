"""Forward passes of any size, and of fixed sizes, from what a host knows: token ids, positions, parents.

All arguments but the caches can be sent to another process, which runs the same pass on its slice of the model.
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
from lp_runtime.model.modules.rotary import library_view, view_behind
from lp_runtime.sampling.sampler import sample_greedily
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.tensors import tensor_on

NOTHING = torch.empty(0)  # what is returned of a call that computes nothing


class Passes:
    """Runs a model in passes of any size, and of fixed sizes once `begin_fixed` has been run. Every pass writes keys
    and values behind what its caches hold, and commits nothing.

    Args:
        model: in eval mode.
        masks: knows the model's kinds of layers.
        strict_tokens: see ModelRunner.
        lengths: at which the model's rotary factors change.

    Attributes:
        lengths: as given.
        strict_tokens: as given.
        made: the passes of fixed sizes; None before `begin_fixed`.
        tree_model: what trees are fed to: the model, or with `strict_tokens` a view of it.
        keeps_logits: whether the model computes the wanted logits only, where it is told which.
        cache_name: the keyword by which the model takes a cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: MaskBuilder,
        strict_tokens: int | None,
        lengths: RotaryLengths = UNCHANGING,
    ):
        self._model, self._masks, self._device = model, masks, model.device
        self.strict_tokens, self.lengths = strict_tokens, lengths
        self.made: PassSet | None = None
        self._told: tuple[int, PreTrainedModel] = (0, model)  # the last length that a pass was told, and what it ran
        self.tree_model = model if strict_tokens is None else view_of(model, STRICT)
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.cache_name = cache_name(model) or CACHE_NAMES[0]

    def run(self, kind: str, caches: Sequence[TreeCache], what: Sequence[object]) -> torch.Tensor:
        """Run the pass that one of the methods below describes.

        Args:
            kind: name of the method.
            caches: its first argument.
            what: its further arguments.
        """
        logits: torch.Tensor = getattr(self, kind)(caches, *what)
        return logits

    def found(
        self, logits: torch.Tensor, feed: Callable[..., torch.Tensor], presampled: torch.Tensor | None = None
    ) -> StepLogits:
        """Return what the pass of a tree has found.

        Args:
            logits: what the pass returned.
            feed: ModelRunner.feed, for further passes.
            presampled: [n, width] what a pass of a fixed size has sampled; None of other passes.
        """
        return StepLogits(logits, presampled, is_reused=presampled is not None)

    @torch.inference_mode()
    def pretend(self, caches: Sequence[TreeCache], length: int) -> torch.Tensor:
        """Have the one cache count as one of `length` tokens, all with its first one's keys and values: to time passes
        behind them. Returns nothing of interest."""
        (cache,) = caches
        cache.repeat_first(length)
        return NOTHING

    def begin_fixed(self, caches: Sequence[TreeCache], options: GraphOptions) -> torch.Tensor:
        """Have passes of fixed sizes from now on. There are no caches; returns nothing of interest, as `make_fixed`."""
        is_strict = self.strict_tokens is not None
        self.made = PassSet(
            self.tree_model, self._masks, options, self.keeps_logits, self.cache_name, self._sample, is_strict
        )
        return NOTHING

    def end_fixed(self, caches: Sequence[TreeCache]) -> torch.Tensor:
        """Have no passes of fixed sizes any more; their memory is free."""
        self.made = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return NOTHING

    @torch.no_grad()
    def make_fixed(self, caches: Sequence[TreeCache], size: PassSize) -> torch.Tensor:
        """Make the pass of a size; PassSet.make says what may go wrong."""
        assert self.made is not None
        self.made.make(size)
        return NOTHING

    @torch.no_grad()
    def fixed(self, caches: Sequence[TreeCache], size: PassSize, pieces: Sequence[tuple]) -> torch.Tensor:
        """Return the logits of the wanted rows of several sequences' shares, fed in the pass of a fixed size, [n, V].

        Args:
            caches: of each share.
            size: of the pass, which has been made.
            pieces: what is fed of each: a Part without its cache.
        """
        assert self.made is not None
        return self.made.run(size, [Part(cache, *piece) for cache, piece in zip(caches, pieces, strict=True)])

    def _sample(self, logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
        """Return [n, width], what greedy sampling picks from logits [n, V], as a pass of a fixed size computes it."""
        return sample_greedily(logits, kernels)

    @torch.inference_mode()
    def chunk(
        self, caches: Sequence[TreeCache], tokens: Sequence[int], rows: Sequence[int] | None = None, length: int = 0
    ) -> torch.Tensor:
        """Feed T tokens of a text behind the one cache; return the logits of n of them, or of the last, [n, V].

        A pass of a prompt's tokens is told the prompt's length, as RotaryLengths.told says.
        """
        (cache,) = caches
        start = cache.length
        positions = torch.arange(start, start + len(tokens), device=self._device)
        mask = self._masks.build_chunk(positions, start)
        kept = 1 if rows is None else tensor_on(self._device, rows)
        return self._forward(tensor_on(self._device, tokens), positions, mask, cache, kept, self._model_told(length))

    @torch.inference_mode()
    def each_alone(self, caches: Sequence[TreeCache], tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of T tokens, each as the end of a text of its own behind the one cache, [T, V]."""
        (cache,) = caches
        ids = tensor_on(self._device, tokens)
        positions = torch.full_like(ids, cache.length)
        mask = self._masks.build([-1] * len(tokens), positions, cache.length)
        return self._forward(ids, positions, mask, cache, len(tokens))

    @torch.inference_mode()
    def share(self, caches: Sequence[TreeCache], layout: InputLayout, length: int = 0) -> torch.Tensor:
        """Return the logits of the wanted rows of a share of a tree, [n, V]; strictly, in passes of strict_tokens.

        Where the model feeds all tokens of a text anew, the pass is told their number: RotaryLengths.told. Strictly, it
        never does.
        """
        (cache,) = caches
        if self.strict_tokens is not None:
            return self._strict_forward(cache, layout, self.strict_tokens)[tensor_on(self._device, layout.rows)]
        ids, positions = tensor_on(self._device, np.stack([layout.tokens, layout.positions]))
        mask = self._masks.build(layout.parents, positions, cache.length)
        num_rows = len(layout.rows)
        are_last = num_rows > 0 and layout.rows[0] == len(layout.tokens) - num_rows
        rows = num_rows if are_last else tensor_on(self._device, layout.rows)
        return self._forward(ids, positions, mask, cache, rows, self._model_told(length))

    @torch.inference_mode()
    def shares(self, caches: Sequence[TreeCache], layouts: Sequence[InputLayout]) -> torch.Tensor:
        """Return the logits of the wanted rows of several sequences' shares, fed in one pass, [n, V]."""
        ids, positions, rows, batched = batch_inputs(caches, layouts, self._masks, self._device)
        return self._forward(ids, positions, batched.mask, batched, rows)

    @torch.inference_mode()
    def text(self, caches: Sequence[TreeCache], tokens: Sequence[int], num_last: int) -> torch.Tensor:
        """Return the logits of a text's last tokens, [num_last, V], as the model itself computes them without any
        cache; there are no caches."""
        assert not caches
        ids = tensor_on(self._device, tokens)[None]
        positions = torch.arange(len(tokens), device=self._device)[None]
        output = self._plain()(input_ids=ids, position_ids=positions, use_cache=False, **self._keeping(num_last))
        return output.logits[0, -num_last:]

    @torch.inference_mode()
    def text_one_by_one(self, caches: Sequence[TreeCache], tokens: Sequence[int], start: int) -> torch.Tensor:
        """Return [n, V] float32 logits as `generate` computes them: of tokens[start - 1], and of each token from start
        on. There are no caches: the model makes its own."""
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
        """Return the argument that has a model compute wanted logits only; none if it cannot."""
        return {"logits_to_keep": rows} if self.keeps_logits else {}

    def _plain(self) -> PreTrainedModel:
        """Return what runs a text as transformers runs it."""
        return library_view(self._model) if self.lengths.change else self._model

    def _model_told(self, length: int) -> PreTrainedModel | None:
        """Return the view that runs tokens of a prompt with so many tokens; None for other tokens, where it is 0."""
        if length and length != self._told[0]:
            self._told = length, view_behind(self._model, length)
        return self._told[1] if length else None

    def _model_for(self, num_tokens: int) -> PreTrainedModel:
        """Return what runs T tokens, or a view of it that runs them faster."""
        return self._model

    def _strict_forward(self, cache: TreeCache, layout: InputLayout, size: int) -> torch.Tensor:
        """Return [T, V] logits of all tokens, from passes of `size` tokens each, the last one filled up."""
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
        """Run the model, or a view of it, on [T] tokens at [T] positions.

        Returns:
            [n, V] logits of rows [n], or of the n last, in the model's dtype.
        """
        arguments = self._keeping(rows) | self._inputs(positions, mask, cache)
        with on(self._device):
            run = view or self._model_for(len(ids))
            logits: torch.Tensor = run(input_ids=ids[None], use_cache=True, **arguments).logits[0]
        if not self.keeps_logits:
            logits = logits[-rows:] if isinstance(rows, int) else logits[rows]
        return logits

    def _inputs(self, positions: torch.Tensor, mask: LayerMasks | None, cache: object) -> dict[str, object]:
        """Return what a pass gives the model beside token ids, by name: positions [T], mask and cache."""
        inputs: dict[str, object] = {"position_ids": positions[None], "attention_mask": mask, self.cache_name: cache}
        return inputs | ({"batch": cache} if isinstance(cache, BatchedCache) else {})
