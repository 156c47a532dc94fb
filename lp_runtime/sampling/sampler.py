"""Sampling of a request's successors from logits, on the replica that owns the nodes.

The result of a node is packed into `width` int64 values, which travel in the exchange:

    successor (32 bits, all ones for none) | log-probability of the successor (32, if requested)
    candidate (24 bits) | margin (8) | candidate | margin, and so on, two top-k candidates per integer
    token (32) | log-probability (32), and so on, the likeliest tokens by the model's logits (if requested)

A node has no successor if the request samples and its processors leave no token above -inf. Nor has a guess for which a
processor fails: `generate` may never call the processor with that text.
A margin is how far a token's log-probability lies below the likeliest one's, in sixteenths of a nat, at most 255.

Letters: n nodes, V vocabulary, K top-k candidates. Logits and scores, the processed logits, are [n, V] float32, and
packed results [n, width] int64. `nodes` are [n] indices into the tree, from the root on. `tokens` are the prompt and
the committed tokens; the last of them is the root. `masks`, [n, words] int32, have the bits of the tokens that a
constraint allows; None without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.kernels.types import NO_TOKEN, Noise, Packing
from lp_runtime.lookahead.drafter import NoiseKey
from lp_runtime.lookahead.top_k import ENTRY, MARGIN_BITS, MAX_MARGIN, UNITS_PER_NAT, K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling.gumbel import GumbelNoise, sample_successors
from lp_runtime.sampling.logprobs import pack_top_logprobs, unpack_top_logprobs
from lp_runtime.sampling.packing import (
    HALF_BITS,
    HALF_MASK,
    pack_kernel,
    unpack_kernel,
)
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.slices import SampleRequest, SlicedLogits
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.utils.memory import is_out_of_memory
from lp_runtime.utils.tensors import tensor_on

Scores = Callable[[], torch.Tensor]
GREEDY_PACKING = Packing(K, 1 + -(-K // 2))  # of K top-k candidates


@dataclass
class Sampler:
    """Processes logits, adds noise, chooses the largest score, and packs the result."""

    processors: TreeProcessors
    noise: GumbelNoise | None  # None for greedy decoding
    with_logprobs: bool = False
    num_top_k: int = 0  # K; 0 for no top-k candidates
    num_top_logprobs: int = 0

    @property
    def noise_key(self) -> NoiseKey | None:
        """Key with which a drafter predicts the noise; None for greedy decoding."""
        return None if self.noise is None else NoiseKey(self.noise.seed, self.noise.sample, self.processors.temperature)

    @property
    def is_ordered(self) -> bool:
        return self.processors.are_ordered

    @property
    def width(self) -> int:
        """Packed size of a node's result, in int64."""
        return self._top_logprobs_column + self.num_top_logprobs

    @property
    def _top_logprobs_column(self) -> int:
        return 1 + -(-self.num_top_k // 2)

    @torch.no_grad()
    def sample(
        self,
        step_logits: StepLogits,
        tree: TokenTree,
        nodes: Sequence[int] | np.ndarray,
        tokens: Sequence[int],
        with_top_k: bool = True,
        masks: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, Scores]:
        """Sample the successors of some nodes; `with_top_k` is False in a step that uses no candidates.

        Returns packed results, and a function that returns the scores, to be called before the next pass.
        """
        positions = self._positions(tree, nodes, tokens)
        kernels, truncation = kernels_for(step_logits.device), self.processors.truncation
        is_greedy = self.noise is None and self.processors.is_empty
        # A captured pass has sampled already.
        if step_logits.presampled is not None and is_greedy and self.num_top_k <= K:
            packed = step_logits.presampled[:, : self._top_logprobs_column].contiguous()
            return self._add_logprobs(packed, step_logits), lambda: step_logits.logits
        # Each shard samples from its slice of the vocabulary.
        if isinstance(step_logits, SlicedLogits) and truncation is not None and not truncation.cuts:
            key = None if self.noise is None else (self.noise.seed, self.noise.sample)
            wanted = SampleRequest(self._packing(with_top_k), truncation, key, positions)
            packed = self._add_logprobs(step_logits.sample(wanted), step_logits)
            return packed, lambda: self.processors(step_logits.logits, tree, nodes, tokens, masks)
        # A kernel applies temperature, top_k and top_p while it samples.
        if kernels is not None and truncation is not None and kernels.can_cut(step_logits.rows.dtype, truncation.top_p):
            noise = self._noise_of(positions, step_logits.device)
            return self._sample_by_kernel(kernels, step_logits, noise, with_top_k)
        # Processors make scores of all logits.
        scores, failed = self._process(step_logits.logits, tree, nodes, tokens, masks)
        return self._sample_scores(step_logits, scores, positions, with_top_k, failed), lambda: scores

    def _process(
        self,
        logits: torch.Tensor,
        tree: TokenTree,
        nodes: Sequence[int] | np.ndarray,
        tokens: Sequence[int],
        masks: np.ndarray | None,
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the scores, and the rows of guesses for which a processor fails; their scores are -inf."""
        try:
            return self.processors(logits, tree, nodes, tokens, masks), []
        except Exception as error:
            if is_out_of_memory(error):
                raise
        scores, failed = torch.full_like(logits, -torch.inf), []
        for row, node in enumerate(nodes):
            part = slice(row, row + 1)
            try:
                mask = None if masks is None else masks[part]
                scores[part] = self.processors(logits[part], tree, [node], tokens, mask)
            except Exception as error:
                if node == tree.root or is_out_of_memory(error):
                    raise
                failed.append(row)
        return scores, failed

    def _sample_by_kernel(
        self, kernels: ModuleType, step_logits: StepLogits, noise: Noise | None, with_top_k: bool
    ) -> tuple[torch.Tensor, Scores]:
        truncation, cut = self.processors.truncation, None
        assert truncation is not None
        inverse = truncation.inverse_temperature
        with on(step_logits.device):
            if truncation.cuts and len(step_logits):
                cut = kernels.find_cut(step_logits.rows, inverse, truncation.top_k, truncation.top_p)
            packed = kernels.sample_and_pack(step_logits.rows, self._packing(with_top_k), noise, inverse, cut)

        def scores() -> torch.Tensor:
            return step_logits.logits * inverse if cut is None else kernels.cut_scores(step_logits.rows, inverse, cut)

        return self._add_logprobs(packed, step_logits), scores

    @torch.no_grad()
    def sample_in_order(
        self,
        step_logits: StepLogits,
        tree: TokenTree,
        nodes: Sequence[int] | np.ndarray,
        tokens: Sequence[int],
        with_top_k: bool,
        may_follow: Callable[[int], bool],
        masks: np.ndarray | None,
    ) -> tuple[torch.Tensor, Scores]:
        """Sample along the accepted path, calling the processors once per committed token and in order.

        Successors of nodes off the path are sampled from unprocessed logits, because drafters learn from them. `nodes`
        must be all nodes from the root on; `may_follow` says whether the accepted path may continue with a node.
        """
        logits = step_logits.logits
        scores = logits.clone()
        node: int | None = tree.root
        prefix, failed = list(tokens), []
        while node is not None and may_follow(node):
            if node != tree.root:
                prefix.append(tree.tokens[node])
            row = slice(node - tree.root, node - tree.root + 1)
            try:
                scores[row] = self.processors.process_next(logits[row], prefix, None if masks is None else masks[row])
            except Exception as error:
                if node == tree.root or is_out_of_memory(error):
                    raise
                failed.append(node - tree.root)  # the text may end before: a stop condition is asked later
                break
            first = sample_successors(scores[row], [len(prefix)], self.noise)
            has_end = self.noise is not None and bool(lack_tokens(scores[row], first))
            node = None if has_end else tree.child(node, int(first))
        positions = self._positions(tree, nodes, tokens)
        return self._sample_scores(step_logits, scores, positions, with_top_k, failed), lambda: scores

    def replay(self, logits: torch.Tensor, prefix: Sequence[int]) -> None:
        """Repeat the ordered processors' calls for a committed token; the [1, V] logits precede it."""
        self.processors.process_next(logits, prefix, is_replay=True)

    def _sample_scores(
        self,
        step_logits: StepLogits,
        scores: torch.Tensor,
        positions: Sequence[int],
        with_top_k: bool,
        failed: list[int],
    ) -> torch.Tensor:
        if kernels := kernels_for(scores.device):
            with on(scores.device):
                noise = self._noise_of(positions, scores.device)
                packed = kernels.sample_and_pack(scores.contiguous(), self._packing(with_top_k), noise)
        else:
            first = sample_successors(scores, positions, self.noise)
            packed = self._pack(scores, first, with_top_k)
        packed = self._add_logprobs(packed, step_logits)
        # Greedy search chooses token 0, as in `generate`. What a model gives without processors is taken as it is.
        if self.noise is not None and self.processors.truncation is None:
            packed[:, 0] |= HALF_MASK * lack_tokens(scores, packed[:, 0] & HALF_MASK)
        if failed:
            packed[failed, 0] |= HALF_MASK
        return packed

    def pack_candidates(self, logits: torch.Tensor) -> torch.Tensor:
        """Pack the top-k candidates of logits after any texts: processors that use a prefix are left out."""
        scores = self.processors.without_prefixes(logits)
        packed = self._pack(scores, torch.zeros(len(logits), dtype=torch.int64, device=logits.device), with_top_k=True)
        return torch.nn.functional.pad(packed, (0, self.width - packed.shape[1]))

    def _add_logprobs(self, packed: torch.Tensor, step_logits: StepLogits) -> torch.Tensor:
        if self.with_logprobs and len(packed):
            logits, first = step_logits.logits, packed[:, :1]
            logprobs = logits.gather(1, first)[:, 0] - logits.logsumexp(dim=-1)
            packed = packed.clone()
            packed[:, 0] |= logprobs.view(torch.int32).long() << HALF_BITS
        if self.num_top_logprobs:
            packed = torch.cat([packed, pack_top_logprobs(step_logits.logits, self.num_top_logprobs)], dim=1)
        return packed

    def _positions(self, tree: TokenTree, nodes: Sequence[int] | np.ndarray, tokens: Sequence[int]) -> list[int]:
        """Return the absolute positions of n nodes' successors, if their noise is needed; else an empty list."""
        if self.noise is None:
            return []
        return [len(tokens) + tree.depths[node] for node in nodes]

    def _noise_of(self, positions: Sequence[int], device: torch.device) -> Noise | None:
        return None if self.noise is None else Noise(self.noise.seed, self.noise.sample, tensor_on(device, positions))

    def _packing(self, with_top_k: bool) -> Packing:
        return Packing(self.num_top_k if with_top_k else 0, self._top_logprobs_column)

    def _pack(self, scores: torch.Tensor, first: torch.Tensor, with_top_k: bool) -> torch.Tensor:
        """Pack [n] successors with top-k candidates; without `with_top_k`, the candidates' columns are zeros."""
        if not (self.num_top_k and with_top_k):
            return torch.nn.functional.pad(first[:, None], (0, self._top_logprobs_column - 1))
        if scores.device.type == "cpu":
            packed = np.empty((len(scores), self._top_logprobs_column), dtype=np.int64)
            packed[:, 0] = first.numpy()
            pack_kernel()(np.ascontiguousarray(scores.numpy()), self.num_top_k, packed)
            return torch.from_numpy(packed)
        ids, margins = top_k(scores, self.num_top_k)
        words = (ids << MARGIN_BITS) | margins
        if words.shape[1] % 2:
            words = torch.nn.functional.pad(words, (0, 1), value=NO_TOKEN << MARGIN_BITS)
        pairs = words[:, 0::2] | (words[:, 1::2] << HALF_BITS)
        return torch.cat([first[:, None], pairs], dim=1)

    def unpack(
        self, packed: np.ndarray, with_top_k: bool = True
    ) -> tuple[np.ndarray, list[float] | None, np.ndarray | None]:
        """Unpack results into [n] int64 successors, -1 for none, log-probabilities and top-k candidates if requested.

        A log-probability is the model's own: under softmax(logits), before processors and noise. The candidates are
        [n, ENTRY] int32, in the layout of lookahead/top_k.py.
        """
        first = packed[:, 0]
        logprobs = (first >> HALF_BITS).astype(np.int32).view(np.float32).tolist() if self.with_logprobs else None
        entries = None
        if self.num_top_k and with_top_k:
            entries = np.empty((len(packed), ENTRY), dtype=np.int32)
            unpack_kernel()(packed, self.num_top_k, entries)
        return first << HALF_BITS >> HALF_BITS, logprobs, entries

    def unpack_top_logprobs(self, packed: np.ndarray) -> list[tuple[tuple[int, float], ...]] | None:
        """Unpack n tuples of (token id, log-probability under softmax(logits)), likeliest first, if requested."""
        return unpack_top_logprobs(packed[:, self._top_logprobs_column :]) if self.num_top_logprobs else None


def lack_tokens(scores: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
    """Whether no token can be sampled from rows of scores, [n, V], whose best tokens are `successors`: [n] bool."""
    return ~(scores.gather(1, successors[:, None])[:, 0] > -torch.inf)  # of -inf and of NaN


def sample_greedily(logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
    """Sample greedily on a GPU, packed like a Sampler with K top-k candidates; does not synchronize."""
    if not kernels.can_cut(logits.dtype, None):
        logits = logits.float()
    return kernels.sample_and_pack(logits, GREEDY_PACKING)


def top_k(scores: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows' `num` likeliest tokens, NO_TOKEN if there are fewer, and margins: [n, K] int64 each."""
    top, ids = scores.topk(min(num, scores.shape[-1]), dim=-1)
    ids = torch.where(top > -torch.inf, ids, NO_TOKEN)
    margins = ((top[:, :1] - top) * UNITS_PER_NAT).round().clamp(0, MAX_MARGIN)
    margins = torch.where(top == top[:, :1], 0, margins)  # both may be infinite, and their difference NaN
    margins = torch.where(top > -torch.inf, margins, MAX_MARGIN).long()
    if ids.shape[1] < num:
        missing = (0, num - ids.shape[1])
        ids = torch.nn.functional.pad(ids, missing, value=NO_TOKEN)
        margins = torch.nn.functional.pad(margins, missing, value=MAX_MARGIN)
    return ids, margins
