"""Forward passes of a few fixed sizes, every tensor of which stays where it is, so that a CUDA graph can replay them.

Launching a step's kernels one by one from Python takes longer than most of them run. A graph launches them all at once,
but with the sizes and addresses that it was captured with: so a tree is filled up to the next of a few sizes, inputs
are copied to where the graph reads them, and the number of committed tokens is read on the device.

Letters: T tokens fed, B the size that they are filled up to, L committed tokens, V vocabulary.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lp_runtime.model.cache import TreeCache
from lp_runtime.model.mask import ancestor_mask
from lp_runtime.model.tree_attention import NAME, Committed, triton_kernels

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_WARM_UPS = 3  # passes before one is captured: libraries set themselves up in the first ones


def can_capture(model) -> bool:
    """Whether a model's passes can be captured: it attends as tree_attention.py does, with Triton's kernels."""
    attention = model.config.get_text_config()._attn_implementation
    return attention == NAME and model.device.type == "cuda" and triton_kernels() is not None


@dataclass
class _Pass:
    """What one size reads and writes. `inputs` is one block, so that one copy brings everything."""

    size: int
    host: torch.Tensor
    inputs: torch.Tensor
    replay: Callable[[], None] | None = None
    logits: torch.Tensor | None = None  # [B, V]


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
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._cache = cache
        self._capture = capture
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._copied = torch.cuda.Event() if self._device.type == "cuda" else None
        self._passes: dict[int, _Pass] = {}

    def forward(self, tokens: Sequence[int], positions: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Feed a tree behind the committed tokens.

        Args:
            tokens, positions: [T], T at most SIZES[-1].
            parents: [T] index of each one's parent, -1 for the first.

        Returns:
            [T, V] logits, until the next pass.
        """
        num_tokens = len(tokens)
        size = SIZES[bisect.bisect_left(SIZES, num_tokens)]
        one = self._passes.get(size)
        if one is None:
            one = self._passes[size] = self._allocate(size)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has read the host's block
        ids, places, length, ancestors = _split(one.host, size)
        num_filling = size - num_tokens
        ids[:] = torch.tensor([*tokens, *[0] * num_filling])
        places[:] = torch.tensor([*positions, *[positions[0]] * num_filling])
        length[:] = self._cache.length
        ancestors[:] = torch.eye(size, dtype=torch.bool)
        ancestors[:num_tokens, :num_tokens] = torch.from_numpy(ancestor_mask(parents))
        one.inputs.copy_(one.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if one.replay is not None:
            one.replay()
        elif self._capture:
            self._capture_pass(one)
        else:
            one.logits = self._run(one)
        return one.logits[:num_tokens]

    def _allocate(self, size: int) -> _Pass:
        num_bytes = 16 * size + 8 + size * size
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return _Pass(size, host, torch.zeros(num_bytes, dtype=torch.uint8, device=self._device))

    def _run(self, one: _Pass) -> torch.Tensor:
        ids, places, length, ancestors = _split(one.inputs, one.size)
        lowest = torch.finfo(self._dtype).min
        mask = torch.zeros(ancestors.shape, dtype=self._dtype, device=self._device).masked_fill_(~ancestors, lowest)
        slots = length + torch.arange(one.size, device=self._device)
        with self._cache.writing_at(slots):
            output = self._model(
                input_ids=ids[None],
                position_ids=places[None],
                attention_mask=mask[None, None],
                past_key_values=self._cache,
                use_cache=True,
                committed=Committed(slots, length),
            )
        return output.logits[0]

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
            one.logits = self._run(one)
        one.replay = graph.replay
        graph.replay()


def _split(block: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of a pass's block: ids [B], positions [B], L [1], int64; ancestors [B, B] bool."""
    numbers, ancestors = block.split([16 * size + 8, size * size])
    ids, places, length = numbers.view(torch.int64).split([size, size, 1])
    return ids, places, length, ancestors.view(torch.bool).view(size, size)
