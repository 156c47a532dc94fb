"""How one request's successors are sampled from logits, on the replica that owns the nodes.

The outcome of a node is packed into `width` integers of 64 bits, which travel:

    successor (32 bits) | log-probability of the successor (32, where asked for)
    candidate (24 bits) | margin (8) | candidate | margin, and so on, two top-k candidates to an integer

A margin is how far a token's log-probability lies below the likeliest one's, in sixteenths of a nat, at most 255.
Letters: n nodes, V vocabulary, K top-k candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch

from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.lookahead.drafters.best_first.tables import ENTRY, ID_BITS, MARGINS, MAX_MARGIN, UNITS_PER_NAT, K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling.gumbel import GumbelNoise, largest, sample_successors
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.utils.jit import bound, compiled, with_fresh_cache

MAX_VOCABULARY = 1 << ID_BITS
NO_TOKEN = MAX_VOCABULARY - 1  # packed where a node has fewer than K candidates
MARGIN_BITS = 8
HALF_BITS = 32  # of a packed integer: a candidate with its margin, or a successor
HALF_MASK = (1 << HALF_BITS) - 1
BLOCK = 64  # scores that are compared at once on a CPU


class Sampler:
    """Processes logits, adds noise, chooses the largest score, and packs the outcome.

    Args:
        processors: applied to every node's logits.
        noise: the sample's noise; None for greedy decoding.
        with_logprobs: whether the log-probability of the sampled token travels with it.
        num_top_k: K, how many top-k candidates travel with a successor; 0 for none.

    Attributes:
        noise: the sample's noise; None for greedy decoding.
        num_top_k: K.
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
    def sample(
        self,
        logits: torch.Tensor,
        tree: TokenTree,
        nodes: Sequence[int] | np.ndarray,
        tokens: Sequence[int],
        with_top_k: bool = True,
        presampled: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the successors of some nodes.

        Args:
            logits: [n, V] float32.
            tree: the step's tree.
            nodes: [n] indices into the tree, from the root on.
            tokens: prompt and committed tokens; the last of them is the root.
            with_top_k: whether to find top-k candidates; False in a step whose candidates nobody looks at.
            presampled: [n, width] what `sample_greedily` has packed of the same logits, in a captured pass; else None.

        Returns:
            (packed, scores): [n, width] int64 for `unpack`, and the [n, V] processed logits that were sampled from.
        """
        is_greedy = self.noise is None and self._processors.is_empty and not self._with_logprobs
        if presampled is not None and is_greedy and self.num_top_k == K:
            return presampled, logits
        scores = self._processors(logits, tree, nodes, tokens)
        # The root is token len(tokens) - 1, so what follows a node of depth d is token len(tokens) + d.
        first = sample_successors(scores, [len(tokens) + tree.depths[node] for node in nodes], self.noise)
        if self._with_logprobs and len(nodes):
            logprobs = logits.gather(1, first[:, None])[:, 0] - logits.logsumexp(dim=-1)
            first = first | (logprobs.view(torch.int32).long() << HALF_BITS)
        if not (self.num_top_k and with_top_k):
            return torch.nn.functional.pad(first[:, None], (0, self.width - 1)), scores
        return self._pack(scores, first), scores

    def _pack(self, scores: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Return [n, width] int64: `first`, [n], and the top-k candidates of `scores`, [n, V]."""
        if scores.device.type == "cpu":
            packed = np.empty((len(scores), self.width), dtype=np.int64)
            packed[:, 0] = first.numpy()
            _pack_kernel()(np.ascontiguousarray(scores.numpy()), self.num_top_k, packed)
            return torch.from_numpy(packed)
        if len(scores) and (kernels := kernels_for(scores.device)):
            with on(scores.device):
                return kernels.pack_top_k(scores, first, self.num_top_k, NO_TOKEN, UNITS_PER_NAT, MAX_MARGIN)
        ids, margins = top_k(scores, self.num_top_k)
        words = (ids << MARGIN_BITS) | margins
        if words.shape[1] % 2:
            words = torch.nn.functional.pad(words, (0, 1), value=NO_TOKEN << MARGIN_BITS)
        pairs = words[:, 0::2] | (words[:, 1::2] << HALF_BITS)
        return torch.cat([first[:, None], pairs], dim=1)

    def unpack(
        self, packed: np.ndarray, with_top_k: bool = True
    ) -> tuple[np.ndarray, list[float] | None, np.ndarray | None]:
        """Return the outcome of n nodes from the integers that travelled.

        A log-probability is the model's own: of the token under softmax(logits), before processors and noise.

        Args:
            packed: [n, width] int64.
            with_top_k: as given to `sample`.

        Returns:
            (successors, logprobs, entries): [n] int64; a list of n, or None if they do not travel; [n, ENTRY] int32
            top-k candidates as best_first/tables.py lays them out, or None if they do not travel.
        """
        first = packed[:, 0]
        logprobs = (first >> HALF_BITS).astype(np.int32).view(np.float32).tolist() if self._with_logprobs else None
        entries = None
        if self.num_top_k and with_top_k:
            entries = np.empty((len(packed), ENTRY), dtype=np.int32)
            _unpack_kernel()(packed, self.num_top_k, entries)
        return first & HALF_MASK, logprobs, entries


def sample_greedily(logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
    """Return what a Sampler of K top-k candidates, without processors, noise and log-probabilities, packs.

    Args:
        logits: [n, V] float32, on a GPU; nothing waits for them.
        kernels: lp_runtime.kernels.triton_gpu.

    Returns:
        [n, width] int64.
    """
    return kernels.pack_top_k(logits, largest(logits), K, NO_TOKEN, UNITS_PER_NAT, MAX_MARGIN)


def top_k(scores: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens of each row, and their margins.

    Args:
        scores: [n, V] float32.
        num: K.

    Returns:
        (ids, margins): [n, K] int64 each; an id is NO_TOKEN where there are fewer.
    """
    top, ids = scores.topk(min(num, scores.shape[-1]), dim=-1)
    margins = (
        ((top[:, :1] - top) * UNITS_PER_NAT)
        .round()
        .nan_to_num(nan=MAX_MARGIN, posinf=MAX_MARGIN)
        .clamp(0, MAX_MARGIN)
        .long()
    )
    if ids.shape[1] < num:
        missing = (0, num - ids.shape[1])
        ids = torch.nn.functional.pad(ids, missing, value=NO_TOKEN)
        margins = torch.nn.functional.pad(margins, missing, value=MAX_MARGIN)
    return ids, margins


@functools.cache
def compile_sampler() -> None:
    """Compile this module's functions, or load them from disk; once a process."""

    def use() -> None:
        """Pack and unpack one node."""
        packed = np.zeros((1, 2), np.int64)
        _pack_kernel()(np.zeros((1, 3), np.float32), 2, packed)
        _unpack_kernel()(packed, 2, np.empty((1, ENTRY), np.int32))

    with_fresh_cache(use)


@functools.cache
def _pack_kernel() -> Callable[[np.ndarray, int, np.ndarray], None]:
    """Return `pack_top_k` for arguments of its types."""
    return bound(pack_top_k, np.zeros((1, 1), np.float32), 0, np.zeros((1, 1), np.int64))


@functools.cache
def _unpack_kernel() -> Callable[[np.ndarray, int, np.ndarray], None]:
    """Return `unpack_top_k` for arguments of its types."""
    return bound(unpack_top_k, np.zeros((1, 1), np.int64), 0, np.zeros((1, 1), np.int32))


@compiled(makes_arrays=True)
def pack_top_k(scores: np.ndarray, num: int, packed: np.ndarray) -> None:
    """Find the likeliest tokens of each row on a CPU and pack them with their margins, in one pass over the scores.

    Args:
        scores: [n, V] float32; a token whose score is -inf is not among the likeliest.
        num: K.
        packed: [n, width] int64; all but the first column is written.
    """
    ids, values = np.empty(num + 1, dtype=np.int64), np.empty(num + 1, dtype=np.float32)
    for row in range(scores.shape[0]):
        line = scores[row]
        ids[:] = NO_TOKEN
        values[:] = -np.inf
        smallest = values[num - 1]
        for start in range(0, line.size, BLOCK):
            block = line[start : start + BLOCK]
            if block.size == BLOCK:
                num_larger = np.int32(0)
                for place in range(BLOCK):  # of most blocks no more than this is done, many tokens at once
                    num_larger += np.int32(block[place] > smallest)
                if num_larger == 0:
                    continue
            for token in range(start, start + block.size):
                if line[token] > smallest:
                    insert_candidate(ids, values, num, token, line[token])
                    smallest = values[num - 1]
        pack_words(ids, values, num, packed, row)


@compiled
def insert_candidate(ids: np.ndarray, values: np.ndarray, num: int, token: int, score: float) -> None:
    """Insert a token among a row's candidates by its score, and drop the last one.

    Args:
        ids: [K + 1] int64 token ids.
        values: [K + 1] float32 scores, the largest first.
        num: K.
        token: token id.
        score: larger than that of the last candidate.
    """
    rank = num - 1
    while rank > 0 and values[rank - 1] < score:
        values[rank], ids[rank] = values[rank - 1], ids[rank - 1]
        rank -= 1
    values[rank], ids[rank] = score, token


@compiled
def pack_words(ids: np.ndarray, values: np.ndarray, num: int, packed: np.ndarray, row: int) -> None:
    """Write a row's candidates and their margins, two to an integer, from column 1 on.

    Args:
        ids: [K + 1] int64 token ids.
        values: [K + 1] float32 scores, the largest first.
        num: K.
        packed: [n, width] int64, written to.
        row: the row to write.
    """
    for rank in range(0, num, 2):
        word = np.int64(0)
        for half in range(2):
            token, margin = np.int64(NO_TOKEN), np.int64(MAX_MARGIN)
            if rank + half < num and values[rank + half] > -np.inf:
                token = ids[rank + half]
                margin = np.int64(0)
                if values[rank + half] < values[0]:  # and not both infinite
                    margin = np.int64(min(np.rint((values[0] - values[rank + half]) * UNITS_PER_NAT), MAX_MARGIN))
            word |= ((token << MARGIN_BITS) | margin) << (HALF_BITS * half)
        packed[row, 1 + rank // 2] = word


@compiled
def unpack_top_k(packed: np.ndarray, num: int, entries: np.ndarray) -> None:
    """Unpack top-k candidates and their margins into entries as best_first/tables.py lays them out.

    Args:
        packed: [n, width] int64.
        num: how many candidates travelled; with fewer than K of tables.py, margins are left out.
        entries: [n, ENTRY] int32; all of it is written, with -1 where there is nothing.
    """
    for row in range(len(packed)):
        for place in range(ENTRY):
            entries[row, place] = -1
        for rank in range(num):
            word = (packed[row, 1 + (rank >> 1)] >> (HALF_BITS * (rank & 1))) & HALF_MASK
            token = word >> MARGIN_BITS
            entries[row, rank] = -1 if token == NO_TOKEN else token
        if num == K:
            for place in range(K // 4):
                margins = np.int64(0)
                for rank in range(4 * place, 4 * place + 4):
                    word = packed[row, 1 + (rank >> 1)] >> (HALF_BITS * (rank & 1))
                    margins |= (word & MAX_MARGIN) << (8 * (rank & 3))
                entries[row, MARGINS + place] = np.int32(margins)
