"""Sliced layers, computed shard by shard: the sum over shards is the whole layer's output."""

import pytest
import torch
from torch import nn

from lp_runtime.distributed.reducers import Reducer
from lp_runtime.model.tensor_parallel.layers import VocabularyEmbedding


class NoReducer(Reducer):
    """Returns one shard's result unchanged; the test adds up the shards."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None]


@pytest.mark.parametrize("sizes", [[5, 5], [4, 3, 3], [10]])
def test_embedding_shards_sum_to_the_whole_embedding(sizes):
    weight = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(0))
    total, first = torch.zeros_like(weight), 0
    for part in weight.split(sizes):
        shard = VocabularyEmbedding(nn.Embedding.from_pretrained(part), NoReducer(), first)
        total += shard(torch.arange(len(weight)))
        first += len(part)
    assert torch.equal(total, weight)
