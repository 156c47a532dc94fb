"""The rule that picks a node's successor. It runs on the replica that owns the node, so no distribution travels.

Letters: n nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# ([n, V] logits, [n] absolute positions of the tokens to be drawn) -> [n] int64 token ids, on the logits' device
SuccessorRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def greedy(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The most likely token, the lowest id of equals: what `generate(do_sample=False)` picks at any position."""
    return logits.argmax(dim=-1)
