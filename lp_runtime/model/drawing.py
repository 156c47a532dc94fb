"""How one request's successors are drawn from logits, on the replica that owns the nodes.

Letters: n nodes, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from lp_runtime.lookahead.sampling import GumbelNoise, draw
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.processors import TreeProcessors

ID_BITS = 32


class Drawing:
    """Process, add noise, take the largest; and pack what was drawn into one integer a node, which travels.

    Args:
        processors: run on each node.
        noise: of the sample; None for greedy decoding.
        with_logprobs: whether the log-probability of what is drawn travels with it.
    """

    def __init__(self, processors: TreeProcessors, noise: GumbelNoise | None, with_logprobs: bool = False):
        self._processors = processors
        self.noise = noise
        self._with_logprobs = with_logprobs

    def draw(
        self, logits: torch.Tensor, tree: TokenTree, nodes: Sequence[int], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the successors of some nodes.

        Args:
            logits: [n, V] float32.
            tree: the step's.
            nodes: [n] indices into the tree, from the root on.
            tokens: committed tokens; the last of them is the root.

        Returns:
            (values, scores): [n] int64 for `unpack`, and the [n, V] processed logits they were drawn from.
        """
        scores = self._processors(logits, tree, nodes, tokens)
        # The root is token len(tokens) - 1, so what follows a node of depth d is token len(tokens) + d.
        values = draw(scores, [len(tokens) + tree.depths[node] for node in nodes], self.noise)
        if self._with_logprobs and nodes:
            logprobs = logits.gather(1, values[:, None])[:, 0] - logits.logsumexp(dim=-1)
            values = values | (logprobs.view(torch.int32).long() << ID_BITS)
        return values, scores

    def unpack(self, values: Sequence[int]) -> tuple[list[int], list[float] | None]:
        """Token ids, and log-probabilities if they travelled.

        The log-probability is the model's own: of the token under softmax(logits), before processors and noise.
        """
        if not self._with_logprobs:
            return list(values), None
        ids = [value & ((1 << ID_BITS) - 1) for value in values]
        bits = struct.pack(f"{len(values)}i", *(value >> ID_BITS for value in values))
        return ids, list(struct.unpack(f"{len(values)}f", bits))
