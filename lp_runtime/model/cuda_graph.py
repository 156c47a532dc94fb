"""Forward passes of a few fixed sizes, whose inputs keep their addresses, so that CUDA graphs can replay them.

Launching a step's kernels one by one from Python takes longer than most of them run. A graph launches them all at once,
but with the sizes and addresses that it was captured with. So trees are padded to the next of a few sizes, inputs are
copied to where the graph reads them (pass_inputs.py), and all that changes from step to step is read on the device: the
addresses of the KV caches, too. A captured pass serves any slot, however long its sequence is, and is captured once.

With exactness=strict there is one size and one graph: every pass feeds as many tokens and is launched alike, whatever
its tokens are of (attention/strict.py says why). A tree of more tokens takes several passes, and passes are shared.

Letters: B tokens of a pass, padding included, n wanted rows, V vocabulary.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.model.attention.mask import MaskBuilder
from lp_runtime.model.attention.strict import BLOCK, compile_paths
from lp_runtime.model.attention.strict import NAME as STRICT
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.graph_capture import GraphCapture
from lp_runtime.model.hf_config import attention_of, takes_attention
from lp_runtime.model.kv_cache.device import DeviceCache
from lp_runtime.model.pass_inputs import Part, PassInputs, compile_pass_inputs
from lp_runtime.model.step_inputs import StepLogits
from lp_runtime.model.strict_parts import cut_into_passes
from lp_runtime.sampling.sampler import sample_greedily

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MIN_LARGEST = 256  # tokens: passes of so many are captured, or none are
MAX_SEQUENCES = 16  # of a pass; a larger batch takes several
MAX_COMPILED = 4 * len(SIZES)  # torch.compile's recompile limit: every size, with one sequence and with several


class GraphOptions(NamedTuple):
    """How trees are fed in passes of fixed sizes.

    Attributes:
        capture: whether a CUDA graph of each size is captured and replayed.
        compiled: whether torch.compile compiles the model, once a size.
    """

    capture: bool
    compiled: bool


def can_capture(model: PreTrainedModel) -> bool:
    """Whether a model's passes can be captured.

    The model must be on one GPU, attend as attention/tree_attention.py or attention/strict.py does, and have keys and
    values of one head size, as the Triton kernels need.
    """
    config = model.config.get_text_config()
    if attention_of(config) not in (TREE, STRICT) or not takes_attention(model):
        return False
    if getattr(config, "v_head_dim", None) is not None:
        return False
    return kernels_for(model.device) is not None and len({each.device for each in model.parameters()}) == 1


class FixedPass:
    """A pass of one size, of one sequence or of several.

    Attributes:
        inputs: what the pass reads.
        cache: stands for the sequences' caches.
        replay: launches the captured graph; None before the capture.
        logits: [B, V] of the wanted rows, in the model's dtype; None before the first run.
        presampled: [B, width] what greedy sampling picks from `logits`, packed as sampling/sampler.py says; None before
            the first run.
    """

    def __init__(self, inputs: PassInputs, cache: DeviceCache):
        self.inputs, self.cache = inputs, cache
        self.replay: Callable[[], None] | None = None
        self.logits: torch.Tensor | None = None
        self.presampled: torch.Tensor | None = None


class FixedPasses:
    """Feeds trees to a model in passes of fixed sizes.

    Args:
        model: a Hugging Face causal LM that attends as attention/tree_attention.py does; with `strict_tokens` as
            attention/strict.py does.
        masks: knows the model's kinds of layers.
        options: whether passes are captured, and whether the model is compiled.
        keeps_logits: whether the model takes `logits_to_keep`.
        refuses_waits: see GraphCapture.
        strict_tokens: tokens of every pass; None for passes of several sizes.

    Attributes:
        options: as given.
        max_tokens: of a pass. A share of more tokens is fed in a pass of any size; with `strict_tokens` in several.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: MaskBuilder,
        options: GraphOptions,
        keeps_logits: bool,
        refuses_waits: bool = True,
        strict_tokens: int | None = None,
    ):
        compile_pass_inputs()
        if strict_tokens is not None:
            compile_paths()
        self._model = torch.compile(model, dynamic=False) if options.compiled else model
        self.options, self._masks, self._keeps_logits = options, masks, keeps_logits
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._device: torch.device = model.device
        self._kernels: Any = kernels_for(self._device)
        on_gpu = self._device.type == "cuda"
        self._num_processors = torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 1
        self._refuses_waits = refuses_waits
        self._capture: GraphCapture | None = None  # made by the first capture
        self._passes: dict[tuple[int, int], FixedPass] = {}
        self._strict_tokens = strict_tokens
        self.max_tokens = strict_tokens or SIZES[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that passes are padded to, ascending."""
        return tuple(size for size in self._all_sizes if size <= self.max_tokens)

    @property
    def _all_sizes(self) -> tuple[int, ...]:
        """Sizes of passes, whether memory suffices for them or not."""
        return SIZES if self._strict_tokens is None else (self._strict_tokens,)

    def _key(self, num_tokens: int, num_sequences: int) -> tuple[int, int]:
        """Return (size, sequences) of the pass that feeds so many tokens of so many sequences."""
        if self._strict_tokens is not None:
            return self._strict_tokens, MAX_SEQUENCES
        return SIZES[bisect.bisect_left(SIZES, num_tokens)], 1 if num_sequences == 1 else MAX_SEQUENCES

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""
        return 0 if self._capture is None else self._capture.count

    def make(self, num_tokens: int, num_sequences: int) -> bool:
        """Make and capture now the pass that feeds so many tokens of so many sequences.

        Args:
            num_tokens: 1 to `max_tokens`.
            num_sequences: 1 to MAX_SEQUENCES.

        Returns:
            whether the pass had to be made.

        Raises:
            ModelError: if the model's passes cannot be captured.
        """
        key = self._key(num_tokens, num_sequences)
        if key in self._passes:
            return False
        masks, is_strict = self._masks, self._strict_tokens is not None
        columns = 1 + BLOCK if is_strict else 0
        inputs = PassInputs(*key, self._num_layers, masks.limits_by_kind, masks.by_kind, self._device, columns)
        cache = DeviceCache(self._num_layers, inputs.device_inputs, self._kernels, self._num_processors, is_strict)
        one = FixedPass(inputs, cache)
        if self.options.capture:
            self._capture = self._capture or GraphCapture(self._device, self._refuses_waits)
            inputs.fill(())  # padding alone: no cache is touched
            one.replay = self._capture.capture(lambda: self.run_pass(one))
        self._passes[key] = one
        return True

    def make_all(self, with_batches: bool) -> Iterator[tuple[int, int]]:
        """Make all passes, the largest first, so that the others find memory that it has used.

        Sizes above MIN_LARGEST for which memory does not suffice are left out: `max_tokens` is lowered.

        Args:
            with_batches: whether several sequences are ever fed in one pass.

        Yields:
            (tokens, sequences) of each pass that was made: the most that it takes.
        """
        for size in reversed(self._all_sizes):
            for num_sequences in (1, MAX_SEQUENCES) if with_batches and size > 1 else (1,):
                try:
                    self.make(size, num_sequences)
                except torch.OutOfMemoryError:
                    if self._strict_tokens is not None or size <= MIN_LARGEST:
                        raise
                    self.max_tokens = SIZES[SIZES.index(size) - 1]
                    torch.cuda.empty_cache()
                    log.warning("memory does not suffice for passes of %d tokens; larger trees are slower", size)
                    break
                yield size, min(size, num_sequences)

    def prepare(self, parts: Sequence[Part]) -> bool:
        """Make the passes that feed some parts; return whether any had to be made."""
        return any([self.make(_num_tokens(chunk), len(chunk)) for chunk in self._chunks(parts)])

    def takes(self, parts: Sequence[Part]) -> bool:
        """Whether parts can be fed in passes of fixed sizes."""
        if self._strict_tokens is not None:
            return True
        return max(len(part.layout.tokens) for part in parts) <= self.max_tokens

    def forward(self, parts: Sequence[Part]) -> list[StepLogits]:
        """Feed a share of a tree of each of some sequences, behind their committed tokens.

        Args:
            parts: at least one; `takes` is True of them.

        Returns:
            logits and what greedy sampling picks from them, valid until the next pass, for each part.
        """
        chunks = self._chunks(parts)
        if len(chunks) == 1:
            return self._forward(chunks[0])
        fed = [part for chunk in chunks for part in chunk]
        found = [each.copy() for chunk in chunks for each in self._forward(chunk)]
        if self._strict_tokens is None:
            return found
        pieces = list(zip(fed, found, strict=True))
        return [_joined([each for piece, each in pieces if piece.cache is part.cache]) for part in parts]

    def _forward(self, parts: Sequence[Part]) -> list[StepLogits]:
        """Feed parts that fit into one pass."""
        num_tokens = _num_tokens(parts)
        self.make(num_tokens, len(parts))
        one = self._passes[self._key(num_tokens, len(parts))]
        with on(self._device):
            one.inputs.fill(parts)
            if one.replay is not None:
                one.replay()
            else:
                self.run_pass(one)
        assert one.logits is not None and one.presampled is not None  # the pass has run
        ends = np.cumsum([len(part.layout.rows) for part in parts]).tolist()
        rows = [slice(*each) for each in zip([0, *ends], ends, strict=False)]
        return [StepLogits(one.logits[each], one.presampled[each], is_reused=True) for each in rows]

    def _chunks(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Return parts in groups that fit into a pass each; with `strict_tokens` they may be cut for that."""
        if self._strict_tokens is not None:
            return cut_into_passes(parts, self._strict_tokens, MAX_SEQUENCES)
        chunks: list[list[Part]] = []
        for part in parts:
            if not chunks or len(chunks[-1]) == MAX_SEQUENCES or _num_tokens([*chunks[-1], part]) > self.max_tokens:
                chunks.append([])
            chunks[-1].append(part)
        return chunks

    def run_pass(self, one: FixedPass) -> None:
        """Run a pass; sets its `logits` and `presampled`."""
        inputs = one.inputs
        # Every size is compiled by itself; beyond its limit torch runs eagerly, without saying so.
        limit = torch._dynamo.config.patch(recompile_limit=MAX_COMPILED) if self.options.compiled else nullcontext()
        options = {"logits_to_keep": inputs.wanted} if self._keeps_logits else {}
        with limit:
            output = self._model(
                input_ids=inputs.ids[None],
                position_ids=inputs.positions[None],
                attention_mask=inputs.masks,
                past_key_values=one.cache,
                use_cache=True,
                device_cache=one.cache,
                **options,
            )
        one.logits = output.logits[0] if self._keeps_logits else output.logits[0].index_select(0, inputs.wanted)
        one.presampled = sample_greedily(one.logits, self._kernels)


def _num_tokens(parts: Sequence[Part]) -> int:
    """Return the number of tokens that are fed of all parts together."""
    return sum(len(part.layout.tokens) for part in parts)


def _joined(pieces: Sequence[StepLogits]) -> StepLogits:
    """Return what several passes have found of one sequence as if one pass had."""
    if len(pieces) == 1:
        return pieces[0]
    presampled = [each.presampled for each in pieces if each.presampled is not None]
    assert len(presampled) == len(pieces)
    return StepLogits(torch.cat([each.rows for each in pieces]), torch.cat(presampled))
