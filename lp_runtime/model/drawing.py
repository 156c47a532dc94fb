"""How one request's successors are drawn from logits, on the replica that owns the nodes.

What is found about a node is packed into `width` integers of 64 bits, which travel:

    successor (24 bits) | rest (8) | log-probability of the successor (32, where asked for)
    runner-up (24 bits) | score (8) | runner-up | score, and so on, two to an integer

Letters: n nodes, V vocabulary, K runners-up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lp_runtime.lookahead.policy import RunnersUp
from lp_runtime.lookahead.sampling import GumbelNoise, draw
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.processors import TreeProcessors

ID_BITS = 24
MAX_VOCABULARY = 1 << ID_BITS
HALF = 32
SCORE_UNIT = 16  # a nat
MAX_SCORE = 255
NO_TOKEN = MAX_VOCABULARY - 1


class Drawing:
    """Process, add noise, take the largest; and pack what was found.

    Args:
        processors: run on each node.
        noise: of the sample; None for greedy decoding.
        with_logprobs: whether the log-probability of what is drawn travels with it.
        num_runners_up: K, how many of the likeliest successors travel with it; 0 for none.
    """

    def __init__(
        self,
        processors: TreeProcessors,
        noise: GumbelNoise | None,
        with_logprobs: bool = False,
        num_runners_up: int = 0,
    ):
        self._processors = processors
        self.noise = noise
        self._with_logprobs = with_logprobs
        self.num_runners_up = num_runners_up

    @property
    def width(self) -> int:
        """Integers of 64 bits that travel for a node."""
        return 1 + -(-self.num_runners_up // 2)

    def draw(
        self,
        logits: torch.Tensor,
        tree: TokenTree,
        nodes: Sequence[int],
        tokens: Sequence[int],
        with_runners_up: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the successors of some nodes.

        Args:
            logits: [n, V] float32.
            tree: the step's.
            nodes: [n] indices into the tree, from the root on.
            tokens: committed tokens; the last of them is the root.
            with_runners_up: False where nobody will look at them, in this step.

        Returns:
            (packed, scores): [n, width] int64 for `unpack`, and the [n, V] processed logits they were drawn from.
        """
        scores = self._processors(logits, tree, nodes, tokens)
        # The root is token len(tokens) - 1, so what follows a node of depth d is token len(tokens) + d.
        first = draw(scores, [len(tokens) + tree.depths[node] for node in nodes], self.noise)
        if self._with_logprobs and nodes:
            logprobs = logits.gather(1, first[:, None])[:, 0] - logits.logsumexp(dim=-1)
            first = first | (logprobs.view(torch.int32).long() << HALF)
        if not (self.num_runners_up and with_runners_up):
            return torch.nn.functional.pad(first[:, None], (0, self.width - 1)), scores
        ids, quantized, rest = runners_up(scores, self.num_runners_up)
        words = (ids << 8) | quantized
        if words.shape[1] % 2:
            words = torch.nn.functional.pad(words, (0, 1), value=NO_TOKEN << 8)
        pairs = words[:, 0::2] | (words[:, 1::2] << HALF)
        return torch.cat([(first | (rest << ID_BITS))[:, None], pairs], dim=1), scores

    def unpack(
        self, packed: np.ndarray, with_runners_up: bool = True
    ) -> tuple[list[int], list[float] | None, RunnersUp | None]:
        """What was found, of each of n nodes: successors, log-probabilities and runners-up, where they travelled.

        The log-probability is the model's own: of the token under softmax(logits), before processors and noise.

        Args:
            packed: [n, width] int64.
            with_runners_up: as when it was drawn.
        """
        first = packed[:, 0]
        logprobs = (first >> HALF).astype(np.int32).view(np.float32).tolist() if self._with_logprobs else None
        found = None
        if self.num_runners_up and with_runners_up:
            words = np.empty((len(packed), 2 * (packed.shape[1] - 1)), dtype=np.int64)
            words[:, 0::2] = packed[:, 1:] & 0xFFFFFFFF
            words[:, 1::2] = (packed[:, 1:] >> HALF) & 0xFFFFFFFF
            words = words[:, : self.num_runners_up]
            ids = (words >> 8).astype(np.int32)
            ids[ids == NO_TOKEN] = -1
            found = RunnersUp(ids, (words & 0xFF).astype(np.uint8), ((first >> ID_BITS) & 0xFF).astype(np.uint8))
        return (first & (MAX_VOCABULARY - 1)).tolist(), logprobs, found


def runners_up(scores: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row, with coarse log-probabilities.

    Args:
        scores: [n, V] float32.
        num: K.

    Returns:
        (ids, quantized, rest): [n, K], [n, K] and [n] int64: token ids, NO_TOKEN where there are fewer; negated
        log-probabilities in sixteenths of a nat, at most 255; the same of all other tokens together.
    """
    top, ids = scores.topk(min(num, scores.shape[-1]), dim=-1)
    logprobs = top - scores.logsumexp(dim=-1, keepdim=True)
    others = (1 - logprobs.exp().sum(dim=-1)).clamp(min=1e-7).log()
    if ids.shape[1] < num:
        missing = (0, num - ids.shape[1])
        ids = torch.nn.functional.pad(ids, missing, value=NO_TOKEN)
        logprobs = torch.nn.functional.pad(logprobs, missing, value=-torch.inf)
    return ids, _quantize(logprobs), _quantize(others)


def _quantize(logprobs: torch.Tensor) -> torch.Tensor:
    scaled = (logprobs * -SCORE_UNIT).round().nan_to_num(nan=MAX_SCORE, posinf=MAX_SCORE)
    return scaled.clamp(0, MAX_SCORE).long()
