"""Forward passes of a few fixed sizes, whose tensors keep their addresses, so that CUDA graphs can replay them.

Launching a step's kernels one by one from Python takes longer than most of them run. A graph launches them all at once,
but with the sizes and addresses that it was captured with. So a tree is padded to the next of a few sizes, inputs are
copied to where the graph reads them, and the number of committed tokens is read on the device.

Letters: T tokens fed, B the size that they are padded to, L committed tokens, n wanted rows, V vocabulary.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.model.attention.tree_attention import NAME, Committed
from lp_runtime.model.hf_config import attention_of
from lp_runtime.model.inputs import InputLayout
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.sampling.sampler import sample_greedily
from lp_runtime.utils.jit import bound, compiled, with_fresh_cache

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WORD_BITS = 64  # of a mask word
MAX_COMPILED = 16 * len(SIZES)  # torch.compile's recompile limit: every size of 16 slots
NUM_WARM_UPS = 3  # passes before a capture: libraries initialize themselves in the first ones


class GraphOptions(NamedTuple):
    """How trees are fed in passes of fixed sizes.

    Attributes:
        capture: whether a CUDA graph of each size is captured at its first use and replayed afterwards.
        compiled: whether torch.compile compiles the model, once a size.
    """

    capture: bool
    compiled: bool


def can_capture(model: PreTrainedModel) -> bool:
    """Whether a model's passes can be captured.

    The model must be on one GPU, attend as attention/tree_attention.py does, and have keys and values of one head size,
    as the Triton kernels need.
    """
    config = model.config.get_text_config()
    if attention_of(config) != NAME or getattr(config, "v_head_dim", None) is not None:
        return False
    return kernels_for(model.device) is not None and len({each.device for each in model.parameters()}) == 1


class GraphPass:
    """The input and output tensors of one size. All inputs are one int64 block, so that one copy moves everything.

    The block: token ids [B], positions [B], wanted rows [B], L [1], and the mask, [B, ceil(B / 64)] words: bit i of
    token t's words, the lowest first, says whether token t sees token i.

    Attributes:
        host: the block in pinned host memory.
        inputs: the block on the device.
        replay: launches the captured graph; None before the capture.
        logits: [B, V] of the wanted rows, in the model's dtype; None before the first run.
        presampled: [B, width] what greedy sampling picks from the wanted rows, packed as sampling/sampler.py says; None
            without Triton.
    """

    def __init__(self, size: int, device: torch.device):
        self.size = size
        num_words = -(-size // WORD_BITS)
        self._sizes = [size, size, size, 1, size * num_words]
        self.host = torch.zeros(sum(self._sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.inputs = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._block = self.host.numpy()
        self._words = self._block[-size * num_words :].reshape(size, num_words)
        places = torch.arange(size, device=device)
        self._word, self._shift = places // WORD_BITS, WORD_BITS - 1 - places % WORD_BITS
        self.replay: Callable[[], None] | None = None
        self.logits: torch.Tensor | None = None
        self.presampled: torch.Tensor | None = None

    def fill(self, layout: InputLayout, num_committed: int) -> None:
        """Write the host's block. Padding tokens see themselves only."""
        arrays = (layout.tokens, layout.positions, layout.parents, layout.rows)
        _fill()(*arrays, num_committed, self.size, self._block, self._words)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of the block on the device: ids [B], positions [B], wanted rows [B], L [1]."""
        return self.inputs.split(self._sizes)[:4]

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask, [B, B], made on the device from the mask words."""
        words = self.inputs[-self._sizes[4] :].view(self.size, -1)
        # Each bit is moved to the sign's place, so that a comparison reads it.
        is_seen = words.index_select(1, self._word) << self._shift < 0
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=words.device)
        return mask.masked_fill_(~is_seen, torch.finfo(dtype).min)


@functools.cache
def _fill() -> Callable:
    """Return `_fill_block`, compiled for the types of its arguments."""
    integers = np.zeros(1, np.int64)
    return bound(_fill_block, *[integers] * 4, 0, 0, integers, np.zeros((1, 1), np.int64))


@functools.cache
def compile_cuda_graph_inputs() -> None:
    """Compile this module's kernels, or load them from Numba's cache; once a process."""
    with_fresh_cache(_fill)


@compiled
def _fill_block(tokens, positions, parents, wanted, num_committed, size, block, words):
    """Write a `GraphPass` block.

    Args:
        tokens: [T] int64.
        positions: [T] int64.
        parents: [T] int64; parents stand before children, -1 for none.
        wanted: [n] int64 rows.
        num_committed: L.
        size: B.
        block: the whole block, written to.
        words: [B, ceil(B / 64)] view of the block's end, written to.
    """
    for i in range(3 * size):
        block[i] = 0
    for i in range(len(tokens)):
        block[i] = tokens[i]
        block[size + i] = positions[i]
    for i in range(len(wanted)):
        block[2 * size + i] = wanted[i]
    block[3 * size] = num_committed
    for i in range(size):
        parent = parents[i] if i < len(parents) else -1
        for word in range(words.shape[1]):
            words[i, word] = words[parent, word] if parent >= 0 else 0
        words[i, i // WORD_BITS] |= np.int64(1) << (i % WORD_BITS)


class CudaGraphRunner:
    """Feeds trees to a model in passes of fixed sizes; the model must attend as attention/tree_attention.py does.

    Args:
        model: a Hugging Face causal LM.
        cache: a slot's cache, used before, so that its layers are allocated; SIZES[-1] tokens more must fit than the
            sequence and a step need.
        capture: whether a CUDA graph of each size is captured at its first use; else every pass runs eagerly.
        compiled: whether torch.compile compiles the model, once a size.
        keeps_logits: whether the model takes `logits_to_keep`, and computes the logits of the wanted rows alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        capture: bool,
        compiled: bool = False,
        keeps_logits: bool = False,
    ):
        compile_cuda_graph_inputs()
        self._model = torch.compile(model, dynamic=False) if compiled else model
        self._compiled, self._keeps_logits = compiled, keeps_logits
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._cache = cache
        self._capture = capture
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._kernels = kernels_for(self._device)
        on_gpu = self._device.type == "cuda"
        self._num_processors = torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 1
        self._copied = torch.cuda.Event() if on_gpu else None
        self._passes: dict[int, GraphPass] = {}

    def forward(self, layout: InputLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feed a share of a tree, of SIZES[-1] tokens at most, behind the committed tokens.

        Returns:
            (logits, presampled): [n, V] in the model's dtype, and [n, width], what greedy sampling picks from them, or
            None without Triton; both are valid until the next pass.
        """
        size = SIZES[bisect.bisect_left(SIZES, len(layout.tokens))]
        one = self._passes.get(size)
        if one is None:
            one = self._passes[size] = GraphPass(size, self._device)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has read the host's block
        one.fill(layout, self._cache.length)
        one.inputs.copy_(one.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        with on(self._device):
            if one.replay is not None:
                one.replay()
            elif self._capture:
                self._capture_pass(one)
            else:
                self.run_pass(one)
        assert one.logits is not None  # the pass has run
        num_rows = len(layout.rows)
        return one.logits[:num_rows], None if one.presampled is None else one.presampled[:num_rows]

    def run_pass(self, one: GraphPass) -> None:
        """Run a pass; sets its `logits` and `presampled`."""
        ids, positions, wanted, length = one.parts()
        cache_positions = length + torch.arange(one.size, device=self._device)
        # Every size of every slot is compiled by itself; beyond its limit torch runs eagerly, without saying so.
        limit = torch._dynamo.config.patch(recompile_limit=MAX_COMPILED) if self._compiled else nullcontext()
        kept = {"logits_to_keep": wanted} if self._keeps_logits else {}
        with limit, self._cache.writing_at(cache_positions):
            output = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=one.mask(self._dtype)[None, None],
                past_key_values=self._cache,
                use_cache=True,
                committed=Committed(cache_positions, length, self._kernels, self._num_processors),
                **kept,
            )
        one.logits = output.logits[0] if kept else output.logits[0].index_select(0, wanted)
        if self._kernels is not None:
            one.presampled = sample_greedily(one.logits, self._kernels)

    def _capture_pass(self, one: GraphPass) -> None:
        """Run a pass, capture it, and replay it once, so that its outputs are written."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self.run_pass(one)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self.run_pass(one)
        one.replay = graph.replay
        graph.replay()
