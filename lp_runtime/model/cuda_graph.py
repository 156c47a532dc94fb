"""Forward passes of a few fixed sizes, every tensor of which stays where it is, so that a CUDA graph can replay them.

Launching a step's kernels one by one from Python takes longer than most of them run. A graph launches them all at once,
but with the sizes and addresses that it was captured with: so a tree is filled up to the next of a few sizes, inputs
are copied to where the graph reads them, and the number of committed tokens is read on the device.

Letters: T tokens fed, B the size that they are filled up to, L committed tokens, V vocabulary.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.model.attention.tree_attention import NAME, Committed
from lp_runtime.model.inputs import InputLayout
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.sampling.sampler import sample_greedily
from lp_runtime.utils.jit import bound, compiled, with_fresh_cache

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WORD_BITS = 64
MOST_COMPILED = 16 * len(SIZES)
NUM_WARM_UPS = 3  # passes before one is captured: libraries set themselves up in the first ones


def can_capture(model) -> bool:
    """Whether a model's passes can be captured: it is on one GPU and attends as tree_attention.py does, with Triton's
    kernels, which take keys and values of one size."""
    config = model.config.get_text_config()
    if config._attn_implementation != NAME or getattr(config, "v_head_dim", None) is not None:
        return False
    return kernels_for(model.device) is not None and len({each.device for each in model.parameters()}) == 1


class _Pass:
    """What one size reads and writes. All inputs are one block of int64, so that one copy brings everything.

    Attributes:
        host, inputs: the block in pinned memory, and on the device: ids [B], positions [B], rows whose logits are
            wanted [B], L, and for each token which of all it sees, [B, ceil(B / 64)] words, the lowest bit first.
        replay: launches what was captured; None before.
        logits: [B, V].
        drawn: [B, width] what greedy decoding draws from the wanted rows, as drawing.py packs it; None without kernels.
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
        self.drawn: torch.Tensor | None = None

    def fill(self, fed: InputLayout, num_committed: int) -> None:
        """Write the host's block; what fills the tree up are texts of one token each."""
        _fill()(fed.tokens, fed.positions, fed.parents, fed.rows, num_committed, self.size, self._block, self._words)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the block on the device: ids [B], positions [B], wanted rows [B], L [1]."""
        return self.inputs.split(self._sizes)[:4]

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """[B, B] what is added to scores, from the words on the device."""
        words = self.inputs[-self._sizes[4] :].view(self.size, -1)
        # A token's bit is moved to where the sign is.
        is_seen = words.index_select(1, self._word) << self._shift < 0
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=words.device)
        return mask.masked_fill_(~is_seen, torch.finfo(dtype).min)


@functools.cache
def _fill() -> Callable:
    """`_fill_block` for arguments of its types."""
    integers = np.zeros(1, np.int64)
    return bound(_fill_block, *[integers] * 4, 0, 0, integers, np.zeros((1, 1), np.int64))


@functools.cache
def compile_cuda_graph_inputs() -> None:
    """Compile, or load from where it is kept, what is compiled here. Once a process."""
    with_fresh_cache(_fill)


@compiled
def _fill_block(tokens, positions, parents, wanted, num_committed, size, block, words):
    """Write a block of _Pass, and its words, [B, n], which are the end of it.

    Args:
        tokens, positions, parents: [T] int64, parents before children, -1 for none.
        wanted: [n] int64.
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
    """Feeds trees to a model in passes of fixed sizes; the model must attend as tree_attention.py does.

    Args:
        model: a Hugging Face causal LM.
        cache: its cache, with SIZES[-1] tokens more room than the text and a step need, and fed before: the layers'
            memory is there.
        capture: whether to capture a CUDA graph of each size when it is first used, else every pass is run anew.
        compiled: whether the model is to be compiled by torch.compile, once a size.
    """

    def __init__(self, model, cache: TreeCache, capture: bool, compiled: bool = False):
        compile_cuda_graph_inputs()
        self._model = torch.compile(model, dynamic=False) if compiled else model
        self._compiled = compiled
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._cache = cache
        self._capture = capture
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._kernels = kernels_for(self._device)
        on_gpu = self._device.type == "cuda"
        self._num_processors = torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 1
        self._copied = torch.cuda.Event() if on_gpu else None
        self._passes: dict[int, _Pass] = {}

    def forward(self, fed: InputLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feed a tree, of SIZES[-1] tokens at most, behind the committed tokens.

        Returns:
            ([n, V] logits, [n, width] what greedy decoding draws from them, until the next pass; None without kernels)
        """
        size = SIZES[bisect.bisect_left(SIZES, len(fed.tokens))]
        one = self._passes.get(size)
        if one is None:
            one = self._passes[size] = _Pass(size, self._device)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has read the host's block
        one.fill(fed, self._cache.length)
        one.inputs.copy_(one.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        with on(self._device):
            if one.replay is not None:
                one.replay()
            elif self._capture:
                self._capture_pass(one)
            else:
                self._run(one)
        num_rows = len(fed.rows)
        logits = one.logits.index_select(0, one.parts()[2][:num_rows])
        return logits, None if one.drawn is None else one.drawn[:num_rows]

    def _run(self, one: _Pass) -> None:
        ids, places, wanted, length = one.parts()
        slots = length + torch.arange(one.size, device=self._device)
        # Every size is compiled by itself, and every cache's; beyond its limit torch goes on without, in silence.
        limit = torch._dynamo.config.patch(recompile_limit=MOST_COMPILED) if self._compiled else nullcontext()
        with limit, self._cache.writing_at(slots):
            output = self._model(
                input_ids=ids[None],
                position_ids=places[None],
                attention_mask=one.mask(self._dtype)[None, None],
                past_key_values=self._cache,
                use_cache=True,
                committed=Committed(slots, length, self._kernels, self._num_processors),
            )
        one.logits = output.logits[0]
        if self._kernels is not None:
            one.drawn = sample_greedily(one.logits.index_select(0, wanted).float(), self._kernels)

    def _capture_pass(self, one: _Pass) -> None:
        """Run a pass, then capture it; writes what it would have written."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self._run(one)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(one)
        one.replay = graph.replay
        graph.replay()
