"""Forward passes of a few fixed sizes, with inputs at fixed addresses, for replay as CUDA graphs.

Launching a step's kernels one by one from Python takes longer than running most of them. A graph launches them all at
once, but only with the sizes and addresses of its capture. So trees are padded to the next of a few sizes, inputs are
copied to where the graph reads them (pass_inputs.py), and everything that changes from step to step is read on the
device, including the addresses of the KV caches. A captured pass serves any slot and any sequence length, and is
captured once. fixed_passes.py chooses the sizes.

Letters: B tokens of a pass, padding included, n wanted rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from lp_runtime.kernels.dispatch import kernels_for, on, why_no_kernels
from lp_runtime.model.attention.mask import MaskBuilder
from lp_runtime.model.attention.strict import BLOCK, compile_paths
from lp_runtime.model.attention.strict import NAME as STRICT
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.forward.graph_capture import GraphCapture
from lp_runtime.model.forward.pass_inputs import Part, PassInputs, compile_pass_inputs
from lp_runtime.model.hf.config import attention_of, differs_by_layer, forward_options
from lp_runtime.model.kv_cache.batch import DeviceCache


class GraphOptions(NamedTuple):
    """Options of fixed-size passes."""

    capture: bool  # whether passes are captured as CUDA graphs
    refuses_waits: bool = True  # as in GraphCapture
    # Whether several sequences are fed in passes of fixed sizes, too. With exactness=strict they always are.
    batches: bool = True
    max_tokens: int = 1  # tokens of the largest pass


class PassSize(NamedTuple):
    """Size of a pass: B tokens, of at most `num_sequences` sequences."""

    num_tokens: int
    num_sequences: int


def why_uncapturable(model: PreTrainedModel) -> str | None:
    """Return why a model's passes cannot be captured; None if they can.

    The model must be on one GPU, use our attention, and have the same head size for keys and values, which the Triton
    kernels require.
    """
    config = model.config.get_text_config()
    if attention_of(config) not in (TREE, STRICT) or not model.is_backend_compatible():
        return "the model uses its own attention"
    if differs_by_layer(config, "v_head_dim") or getattr(config, "v_head_dim", None) is not None:
        return "keys and values have different head sizes"
    if len({each.device for each in model.parameters()}) > 1:
        return "the model spans several devices"
    return why_no_kernels(model.device)


class FixedPass:
    """A pass of one size, for one sequence or several."""

    def __init__(self, inputs: PassInputs, cache: DeviceCache):
        self.inputs, self.cache = inputs, cache
        self.replay: Callable[[], None] | None = None  # launches the captured graph; None before the capture
        # [B, V] of the wanted rows, in memory that all sizes share; None before the first run.
        self.logits: torch.Tensor | None = None
        # [B, width] greedy samples of `logits`, packed as in sampling/sampler.py; None before the first run.
        self.presampled: torch.Tensor | None = None


class PassSet:
    """The passes of fixed sizes of a model: makes, captures and runs them."""

    def __init__(
        self,
        # A Hugging Face causal LM with the attention of attention/tree_attention.py; of attention/strict.py if
        # `is_strict`.
        model: PreTrainedModel,
        masks: MaskBuilder,
        options: GraphOptions,
        keeps_logits: bool,
        cache_name: str,
        # Returns the packed greedy samples, [B, width], of logits [B, V], using the given kernels; must not wait for
        # the device.
        sample: Callable[[torch.Tensor, ModuleType], torch.Tensor],
        is_strict: bool = False,
    ):
        compile_pass_inputs()
        if is_strict:
            compile_paths()
        self._model = model
        self.options = options
        self._masks = masks
        self._keeps_logits = keeps_logits
        self._sample = sample
        self._cache_name = cache_name
        # [n, width] greedy samples of the last run's logits, valid until the next run.
        self.presampled: torch.Tensor | None = None
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._device: torch.device = model.device
        self._kernels: Any = kernels_for(self._device)
        on_gpu = self._device.type == "cuda"
        self._num_processors = torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 1
        self._capture: GraphCapture | None = None  # made by the first capture
        self._passes: dict[PassSize, FixedPass] = {}
        self._logits: torch.Tensor | None = None  # [rows of the largest pass so far, V], written by every pass
        self._is_strict = is_strict

    def __contains__(self, size: PassSize) -> bool:
        return size in self._passes

    def make(self, size: PassSize) -> None:
        """Make the pass of a size, captured if the options ask for that; may raise torch.OutOfMemoryError."""
        masks = self._masks
        columns = 1 + BLOCK if self._is_strict else 0
        inputs = PassInputs(*size, self._num_layers, masks.limits_by_kind, masks.by_kind, self._device, columns)
        cache = DeviceCache(
            self._num_layers, inputs.device_inputs, self._kernels, self._num_processors, self._is_strict
        )
        one, before = FixedPass(inputs, cache), self._logits
        if self.options.capture:
            self._capture = self._capture or GraphCapture(self._device, self.options.refuses_waits)
            inputs.fill(())  # padding only: no cache is touched
            try:
                one.replay = self._capture.capture(lambda: self.run_pass(one))
            except BaseException:
                self._logits = before
                raise
        self._passes[size] = one

    def drop(self, num_tokens: int) -> None:
        """Forget the passes of this many tokens, whose memory is then free."""
        self._passes = {size: one for size, one in self._passes.items() if size.num_tokens != num_tokens}

    def run(self, size: PassSize, parts: Sequence[Part]) -> torch.Tensor:
        """Feed parts in the pass of a size that has been made; return [n, V] logits of the wanted rows.

        Sets `presampled`, too. Both hold one part after another, and are valid until the next run.
        """
        one = self._passes[size]
        with on(self._device):
            one.inputs.fill(parts)
            if one.replay is not None:
                one.replay()
            else:
                self.run_pass(one)
        assert one.logits is not None and one.presampled is not None  # the pass has run
        num_rows = sum(len(part.layout.rows) for part in parts)
        self.presampled = one.presampled[:num_rows]
        return one.logits[:num_rows]

    def run_pass(self, one: FixedPass) -> None:
        """Run a pass eagerly, or while it is captured; sets its `logits` and `presampled`."""
        inputs = one.inputs
        options = {self._cache_name: one.cache} | forward_options(self._model)
        options |= {"logits_to_keep": inputs.wanted} if self._keeps_logits else {}
        output = self._model(
            input_ids=inputs.ids[None],
            position_ids=inputs.positions[None],
            attention_mask=inputs.masks,
            use_cache=True,
            device_cache=one.cache,
            **options,
        )
        logits = output.logits[0] if self._keeps_logits else output.logits[0].index_select(0, inputs.wanted)
        if self._logits is None or len(self._logits) < len(logits):
            self._logits = self._allocate_logits(logits)
        one.logits = self._logits[: len(logits)].copy_(logits)
        one.presampled = self._sample(one.logits, self._kernels)

    @torch.inference_mode(False)  # a tensor of inference mode could be written only there
    def _allocate_logits(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for the logits of all sizes; if there is too little for that, for those given, [B, V]."""
        num_rows, size = like.shape
        try:
            return torch.empty((max(num_rows, self.options.max_tokens), size), dtype=like.dtype, device=like.device)
        except torch.OutOfMemoryError:
            return torch.empty((num_rows, size), dtype=like.dtype, device=like.device)
