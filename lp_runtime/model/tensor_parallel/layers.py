"""Modules of a sliced model that put together what the shards of a replica compute.

Letters: P shards, T tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lp_runtime.distributed.reducers import Reducer


class SliceModule(nn.Module):
    """A module whose shards each hold a slice, and whose output is the whole module's.

    Args:
        sliced: holds this shard's slice.
        reducer: puts outputs together.

    Attributes:
        sliced: see Args.
    """

    def __init__(self, sliced: nn.Module, reducer: Reducer):
        super().__init__()
        self.sliced, self._reducer = sliced, reducer

    @property
    def weight(self) -> torch.Tensor:
        """This shard's slice of the weights."""
        return self.sliced.weight  # type: ignore[return-value]  # torch declares it as Tensor | Module


class RowwiseLinear(SliceModule):
    """A linear layer whose weights are split by inputs: each shard has its part of the input, and the shards' outputs
    are summed. The bias, which every shard has, is added once.

    Args:
        linear: this shard's part.
        reducer: sums outputs.
        splits_input: whether every shard is given the whole input, and takes its part of it.
        first: the first of this shard's inputs.

    Attributes:
        in_features: numbers of this shard's part of an input.
        out_features: numbers of an output.
        bias: [out_features]; None without one.
    """

    def __init__(self, linear: nn.Linear, reducer: Reducer, splits_input: bool = False, first: int = 0):
        super().__init__(linear, reducer)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        linear.bias = None  # type: ignore[assignment]  # as torch has it for a layer without one
        self._first = first if splits_input else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole layer's output, [..., out_features], of [..., in_features]."""
        if self._first is not None:
            x = x[..., self._first : self._first + self.in_features]
        total = self._reducer.all_reduce(self.sliced(x))
        return total if self.bias is None else total + self.bias


@dataclass
class OutputMode:
    """What a GatheredLinear returns; its views (model/hf/view.py) have it, too.

    Attributes:
        is_whole: whether that is the whole output, and not this shard's part of it alone.
    """

    is_whole: bool = True


class GatheredLinear(SliceModule):
    """A linear layer whose weights are split by outputs, and whose output is put together: the head, by vocabulary.

    Args:
        linear: this shard's part.
        reducer: puts outputs together.
        sizes: [P] outputs of each shard's part, the largest first.
        shard: this shard's number.

    Attributes:
        out_features: numbers of the whole output.
        sizes: as given.
        shard: as given.
        mode: what `forward` returns.
    """

    def __init__(self, linear: nn.Linear, reducer: Reducer, sizes: list[int], shard: int):
        super().__init__(linear, reducer)
        self.in_features, self.out_features = linear.in_features, sum(sizes)
        self.sizes, self.shard, self.mode = sizes, shard, OutputMode()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole layer's output, [..., out_features], or this shard's part of it."""
        part = self.sliced(x)
        return self.put_together(part) if self.mode.is_whole else part

    def put_together(self, part: torch.Tensor) -> torch.Tensor:
        """Return all shards' parts of an output side by side, [..., out_features]."""
        parts = self.gather(nn.functional.pad(part, (0, self.sizes[0] - part.shape[-1])))
        return torch.cat([each[..., :size] for each, size in zip(parts, self.sizes, strict=True)], -1)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all shards' tensors, of one shape, [P, ...]."""
        return self._reducer.all_gather(tensor)


class VocabularyEmbedding(SliceModule):
    """An embedding that is split by vocabulary: the shard that has a token looks it up, the others add zeros.

    Args:
        embedding: this shard's part.
        reducer: sums outputs.
        first: id of the first token of this shard's part.
    """

    def __init__(self, embedding: nn.Embedding, reducer: Reducer, first: int):
        super().__init__(embedding, reducer)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self._first = first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of token ids, [..., E]."""
        place = ids - self._first
        is_here = (place >= 0) & (place < self.num_embeddings)
        found = self.sliced(place.clamp(0, self.num_embeddings - 1))
        return self._reducer.all_reduce(found.masked_fill(~is_here[..., None], 0.0))


def is_sliced(model: nn.Module) -> bool:
    """Whether a model was sliced by `slicing.slice_model`."""
    return any(isinstance(module, SliceModule) for module in model.modules())
