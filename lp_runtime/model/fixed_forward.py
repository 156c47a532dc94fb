"""Forward passes of a few fixed sizes, every tensor of which stays where it is, so that a CUDA graph can replay them.

Launching a step's kernels one by one from Python takes longer than most of them run. A graph launches them all at once,
but with the sizes and addresses that it was captured with: so a tree is filled up to the next of a few sizes, inputs
are copied to where the graph reads them, and the number of committed tokens is read on the device.

Letters: T tokens fed, B the size that they are filled up to, L committed tokens, V vocabulary.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from lp_runtime.model.cache import TreeCache
from lp_runtime.model.drawing import draw_greedily
from lp_runtime.model.kernels import kernels_for, on
from lp_runtime.model.mask import mark_ancestors
from lp_runtime.model.tree_attention import NAME, Committed

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
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
    """What one size reads and writes. All inputs are one block, so that one copy brings everything.

    Attributes:
        host, inputs: [bytes] uint8, the block in pinned memory, and on the device.
        numbers, ancestors: views of the host's: ids [B], positions [B], rows whose logits are wanted [B] and L, int64;
            [B, B] bool.
        replay: launches what was captured; None before.
        logits: [B, V].
        drawn: [B, width] what greedy decoding draws from the wanted rows, as drawing.py packs it; None without kernels.
    """

    def __init__(self, size: int, device: torch.device):
        self.size = size
        num_bytes = 8 * (3 * size + 1) + size * size
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.numbers = self.host.numpy()[: -size * size].view(np.int64)
        self.ancestors = self.host.numpy()[-size * size :].view(np.bool_).reshape(size, size)
        self.replay: Callable[[], None] | None = None
        self.logits: torch.Tensor | None = None
        self.drawn: torch.Tensor | None = None

    def fill(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        parents: np.ndarray,
        wanted: np.ndarray,
        num_committed: int,
    ) -> None:
        """Write the host's block; what fills the tree up are texts of one token each."""
        size, num_tokens = self.size, len(tokens)
        self.numbers[: 2 * size] = 0
        self.numbers[:num_tokens] = tokens
        self.numbers[size : size + num_tokens] = positions
        self.numbers[2 * size : 2 * size + len(wanted)] = wanted
        self.numbers[-1] = num_committed
        all_parents = np.full(size, -1, dtype=np.int64)
        all_parents[:num_tokens] = parents
        mark_ancestors(all_parents, self.ancestors)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the block on the device: ids [B], positions [B], wanted rows [B], L [1], int64; ancestors [B, B]."""
        size = self.size
        numbers, ancestors = self.inputs.split([8 * (3 * size + 1), size * size])
        ids, positions, wanted, length = numbers.view(torch.int64).split([size, size, size, 1])
        return ids, positions, wanted, length, ancestors.view(torch.bool).view(size, size)


class FixedForward:
    """Feeds trees to a model in passes of fixed sizes; the model must attend as tree_attention.py does.

    Args:
        model: a Hugging Face causal LM.
        cache: its cache, with SIZES[-1] tokens more room than the text and a step need, and fed before: the layers'
            memory is there.
        capture: whether to capture a CUDA graph of each size when it is first used, else every pass is run anew.
        compiled: whether the model is to be compiled by torch.compile, once a size.
    """

    def __init__(self, model, cache: TreeCache, capture: bool, compiled: bool = False):
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

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, parents: np.ndarray, wanted: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feed a tree behind the committed tokens.

        Args:
            tokens, positions: [T] int64, T at most SIZES[-1].
            parents: [T] int64 index of each one's parent, -1 for the first.
            wanted: [n] int64 indices of those whose logits are wanted.

        Returns:
            ([n, V] logits, [n, width] what greedy decoding draws from them, until the next pass; None without kernels)
        """
        size = SIZES[bisect.bisect_left(SIZES, len(tokens))]
        one = self._passes.get(size)
        if one is None:
            one = self._passes[size] = _Pass(size, self._device)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has read the host's block
        one.fill(tokens, positions, parents, wanted, self._cache.length)
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
        logits = one.logits.index_select(0, one.parts()[2][: len(wanted)])
        return logits, None if one.drawn is None else one.drawn[: len(wanted)]

    def _run(self, one: _Pass) -> None:
        ids, places, wanted, length, ancestors = one.parts()
        lowest = torch.finfo(self._dtype).min
        mask = torch.zeros(ancestors.shape, dtype=self._dtype, device=self._device).masked_fill_(~ancestors, lowest)
        slots = length + torch.arange(one.size, device=self._device)
        # Every size is compiled by itself, and every cache's; beyond its limit torch goes on without, in silence.
        limit = torch._dynamo.config.patch(recompile_limit=MOST_COMPILED) if self._compiled else nullcontext()
        with limit, self._cache.writing_at(slots):
            output = self._model(
                input_ids=ids[None],
                position_ids=places[None],
                attention_mask=mask[None, None],
                past_key_values=self._cache,
                use_cache=True,
                committed=Committed(slots, length, self._kernels, self._num_processors),
            )
        one.logits = output.logits[0]
        if self._kernels is not None:
            one.drawn = draw_greedily(one.logits.index_select(0, wanted).float(), self._kernels)

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
