"""How one request's successors are drawn from logits, on the replica that owns the nodes.

What is found about a node is packed into `width` integers of 64 bits, which travel:

    successor (32 bits) | log-probability of the successor (32, where asked for)
    runner-up (24 bits) | gap (8) | runner-up | gap, and so on, two to an integer

A gap is how far a token's log-probability lies below the likeliest one's, in sixteenths of a nat, at most 255.
Letters: n nodes, V vocabulary, K runners-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch

from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.lookahead.drafters.best_first.tables import ENTRY, MARGINS, K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling.gumbel import GumbelNoise, draw, largest
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.utils.jit import bound, compiled, with_fresh_cache

ID_BITS = 24
MAX_VOCABULARY = 1 << ID_BITS
HALF = 32
MARGIN_UNIT = 16  # a nat
MAX_MARGIN = 255
BLOCK = 64  # scores
NO_TOKEN = MAX_VOCABULARY - 1


class Sampler:
    """Process, add noise, take the largest; and pack what was found.

    Args:
        processors: run on each node.
        noise: of the sample; None for greedy decoding.
        with_logprobs: whether the log-probability of what is drawn travels with it.
        num_top_k: K, how many of the likeliest successors travel with it; 0 for none.
    """

    def __init__(
        self,
        processors: TreeProcessors,
        noise: GumbelNoise | None,
        with_logprobs: bool = False,
        num_top_k: int = 0,
    ):
        self._processors = processors
        self.noise = noise
        self._with_logprobs = with_logprobs
        self.num_top_k = num_top_k

    @property
    def width(self) -> int:
        """Integers of 64 bits that travel for a node."""
        return 1 + -(-self.num_top_k // 2)

    @torch.no_grad()
    def draw(
        self,
        logits: torch.Tensor,
        tree: TokenTree,
        nodes: Sequence[int],
        tokens: Sequence[int],
        with_top_k: bool = True,
        drawn: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the successors of some nodes.

        Args:
            logits: [n, V] float32.
            tree: the step's.
            nodes: [n] indices into the tree, from the root on.
            tokens: committed tokens; the last of them is the root.
            with_top_k: False where nobody will look at them, in this step.
            drawn: [n, width] what `sample_greedily` has drawn from the same logits, if it has.

        Returns:
            (packed, scores): [n, width] int64 for `unpack`, and the [n, V] processed logits they were drawn from.
        """
        is_greedy = self.noise is None and self._processors.is_empty and not self._with_logprobs
        if drawn is not None and is_greedy and self.num_top_k == K:
            return drawn, logits
        scores = self._processors(logits, tree, nodes, tokens)
        # The root is token len(tokens) - 1, so what follows a node of depth d is token len(tokens) + d.
        first = draw(scores, [len(tokens) + tree.depths[node] for node in nodes], self.noise)
        if self._with_logprobs and len(nodes):
            logprobs = logits.gather(1, first[:, None])[:, 0] - logits.logsumexp(dim=-1)
            first = first | (logprobs.view(torch.int32).long() << HALF)
        if not (self.num_top_k and with_top_k):
            return torch.nn.functional.pad(first[:, None], (0, self.width - 1)), scores
        if scores.device.type == "cpu":
            packed = np.empty((len(nodes), self.width), dtype=np.int64)
            packed[:, 0] = first.numpy()
            _pack()(np.ascontiguousarray(scores.numpy()), self.num_top_k, packed)
            return torch.from_numpy(packed), scores
        if len(nodes) and (kernels := kernels_for(scores.device)):
            with on(scores.device):
                packed = kernels.pack_top_k(scores, first, self.num_top_k, NO_TOKEN, MARGIN_UNIT, MAX_MARGIN)
            return packed, scores
        ids, gaps = top_k(scores, self.num_top_k)
        words = (ids << 8) | gaps
        if words.shape[1] % 2:
            words = torch.nn.functional.pad(words, (0, 1), value=NO_TOKEN << 8)
        pairs = words[:, 0::2] | (words[:, 1::2] << HALF)
        return torch.cat([first[:, None], pairs], dim=1), scores

    def unpack(
        self, packed: np.ndarray, with_top_k: bool = True
    ) -> tuple[np.ndarray, list[float] | None, np.ndarray | None]:
        """What was found, of each of n nodes: successors, log-probabilities and runners-up, where they travelled.

        The log-probability is the model's own: of the token under softmax(logits), before processors and noise.

        Args:
            packed: [n, width] int64.
            with_top_k: as when it was drawn.

        Returns:
            (successors, logprobs, entries): [n] int64; a list; [n, ENTRY] int32, as tables.py has it.
        """
        first = packed[:, 0]
        logprobs = (first >> HALF).astype(np.int32).view(np.float32).tolist() if self._with_logprobs else None
        entries = None
        if self.num_top_k and with_top_k:
            entries = np.empty((len(packed), ENTRY), dtype=np.int32)
            _unpack()(packed, self.num_top_k, entries)
        return first & 0xFFFFFFFF, logprobs, entries


def sample_greedily(logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
    """[n, width] what a Sampler of K runners-up, without processors, noise and log-probabilities, packs.

    Args:
        logits: [n, V] float32, on a GPU; nothing waits for it.
        kernels: triton_gpu.py.
    """
    return kernels.pack_top_k(logits, largest(logits), K, NO_TOKEN, MARGIN_UNIT, MAX_MARGIN)


def top_k(scores: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row, and their gaps.

    Args:
        scores: [n, V] float32.
        num: how many, K.

    Returns:
        (ids, gaps): [n, K] int64 each; token ids, NO_TOKEN where there are fewer.
    """
    top, ids = scores.topk(min(num, scores.shape[-1]), dim=-1)
    gaps = (
        ((top[:, :1] - top) * MARGIN_UNIT)
        .round()
        .nan_to_num(nan=MAX_MARGIN, posinf=MAX_MARGIN)
        .clamp(0, MAX_MARGIN)
        .long()
    )
    if ids.shape[1] < num:
        missing = (0, num - ids.shape[1])
        ids = torch.nn.functional.pad(ids, missing, value=NO_TOKEN)
        gaps = torch.nn.functional.pad(gaps, missing, value=MAX_MARGIN)
    return ids, gaps


@functools.cache
def compile_sampler() -> None:
    """Compile, or load from where it is kept, what is compiled here. Once a process."""

    def use() -> None:
        packed = np.zeros((1, 2), np.int64)
        _pack()(np.zeros((1, 3), np.float32), 2, packed)
        _unpack()(packed, 2, np.empty((1, ENTRY), np.int32))

    with_fresh_cache(use)


@functools.cache
def _pack() -> Callable:
    return bound(pack_top_k, np.zeros((1, 1), np.float32), 0, np.zeros((1, 1), np.int64))


@functools.cache
def _unpack() -> Callable:
    return bound(unpack_top_k, np.zeros((1, 1), np.int64), 0, np.zeros((1, 1), np.int32))


@compiled(makes_arrays=True)
def pack_top_k(scores: np.ndarray, num: int, packed: np.ndarray) -> None:
    """The same on a CPU, in one pass over the scores, and packed; what may not be drawn is not among them.

    Args:
        scores: [n, V] float32.
        num: how many, K.
        packed: [n, width] int64; all but the first column is filled in.
    """
    ids, values = np.empty(num + 1, dtype=np.int64), np.empty(num + 1, dtype=np.float32)
    for row in range(scores.shape[0]):
        line = scores[row]
        ids[:] = NO_TOKEN
        values[:] = -np.inf
        least = values[num - 1]
        for start in range(0, line.size, BLOCK):
            block = line[start : start + BLOCK]
            if block.size == BLOCK:
                num_larger = np.int32(0)
                for place in range(BLOCK):  # of most blocks no more than this is done, many tokens at once
                    num_larger += np.int32(block[place] > least)
                if num_larger == 0:
                    continue
            for token in range(start, start + block.size):
                score = line[token]
                if score > least:
                    rank = num - 1
                    while rank > 0 and values[rank - 1] < score:
                        values[rank], ids[rank] = values[rank - 1], ids[rank - 1]
                        rank -= 1
                    values[rank], ids[rank] = score, token
                    least = values[num - 1]
        for rank in range(0, num, 2):
            word = np.int64(0)
            for half in range(2):
                token, gap = np.int64(NO_TOKEN), np.int64(MAX_MARGIN)
                if rank + half < num and values[rank + half] > -np.inf:
                    token = ids[rank + half]
                    gap = np.int64(0)
                    if values[rank + half] < values[0]:  # and not both infinite
                        gap = np.int64(min(np.rint((values[0] - values[rank + half]) * MARGIN_UNIT), MAX_MARGIN))
                word |= ((token << 8) | gap) << (HALF * half)
            packed[row, 1 + rank // 2] = word


@compiled
def unpack_top_k(packed: np.ndarray, num: int, entries: np.ndarray) -> None:
    """Runners-up and their gaps, as tables.py has them.

    Args:
        packed: [n, width] int64.
        num: how many, K; with fewer than that file's K, the gaps are left out.
        entries: [n, ENTRY] int32; all of it is filled in, with -1 where there is nothing.
    """
    for row in range(len(packed)):
        for place in range(ENTRY):
            entries[row, place] = -1
        for rank in range(num):
            word = (packed[row, 1 + (rank >> 1)] >> (HALF * (rank & 1))) & 0xFFFFFFFF
            token = word >> 8
            entries[row, rank] = -1 if token == NO_TOKEN else token
        if num == K:
            for place in range(K // 4):
                gaps = np.int64(0)
                for rank in range(4 * place, 4 * place + 4):
                    word = packed[row, 1 + (rank >> 1)] >> (HALF * (rank & 1))
                    gaps |= (word & 255) << (8 * (rank & 3))
                entries[row, MARGINS + place] = np.int32(gaps)
