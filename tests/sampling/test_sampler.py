"""Sampling results of nodes, packed into integers for the exchange."""

import pytest
import torch
from support.thinned import thinned

from lp_runtime.kernels.types import NO_TOKEN
from lp_runtime.lookahead.top_k import ENTRY, K, margin_of
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling.packing import BLOCK
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler, top_k
from lp_runtime.sampling.step_logits import StepLogits

CPU = torch.device("cpu")


def make_sampler(**settings) -> Sampler:
    return Sampler(TreeProcessors([], CPU), None, **settings)


def outcome(sampler: Sampler, logits: torch.Tensor, **options):
    tree = TokenTree([0], max_depth=9)
    packed, _ = sampler.sample(StepLogits(logits), tree, [0] * len(logits), [0], **options)
    assert packed.shape == (len(logits), sampler.width)
    return sampler.unpack(packed.numpy(), **options)


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("num", [0, 1, K])
@pytest.mark.parametrize("size", [3, 50, 300_000])
def test_unpack_returns_the_sampled_results(with_logprobs, num, size):
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    logits[0, size - 1] = 30  # the largest id
    successors, logprobs, entries = outcome(make_sampler(with_logprobs=with_logprobs, num_top_k=num), logits)
    assert successors.tolist() == logits.argmax(-1).tolist()
    if with_logprobs:
        assert logprobs == pytest.approx(logits.log_softmax(-1).max(-1).values.tolist(), abs=1e-5)
    else:
        assert logprobs is None
    if not num:
        assert entries is None
        return
    kept = min(num, size)
    top = logits.topk(kept)
    assert entries.shape == (3, ENTRY)
    assert entries[:, :kept].tolist() == top.indices.tolist()
    assert (entries[:, kept:K] == -1).all()
    if num == K:
        for row, values in zip(entries, top.values, strict=True):
            margins = [margin_of(row[None], 0, rank) for rank in range(kept)]
            assert margins == pytest.approx(((values[0] - values) * 16).clamp(max=255).round().tolist(), abs=1)


def test_candidates_are_skipped_if_not_requested():
    sampler = make_sampler(num_top_k=K)
    successors, _, entries = outcome(sampler, torch.eye(4), with_top_k=False)
    assert successors.tolist() == [0, 1, 2, 3] and entries is None


def test_excluded_token_gets_the_largest_margin():
    _, margins = top_k(torch.tensor([[3.0, float("-inf"), 2.0]]), 3)
    assert margins.tolist() == [[0, 16, 255]]


@pytest.mark.parametrize(
    ("kind", "size", "num"),
    thinned(
        5,
        ["random", "rising", "falling", "equal", "few", "none", "infinite", "no numbers"],
        [1, K, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 7],
        [1, 3, K],
    ),
)
def test_packed_candidates_match_top_k(kind, size, num):
    logits = {
        "random": torch.randn(4, size, generator=torch.Generator().manual_seed(size)),
        "rising": torch.arange(size).expand(4, size) / 8.0,
        "falling": -torch.arange(size).expand(4, size) / 8.0,
        "equal": torch.zeros(4, size),
        "few": torch.full((4, size), -torch.inf).index_fill_(1, torch.tensor([size // 2]), 1.0),
        "none": torch.full((4, size), -torch.inf),
        "infinite": torch.randn(4, size).index_fill_(1, torch.tensor([0, size // 2]), torch.inf),
        "no numbers": torch.full((4, size), torch.nan),
    }[kind].contiguous()
    successors, _, entries = outcome(make_sampler(num_top_k=num), logits)
    assert successors.tolist() == logits.argmax(-1).tolist()
    ids, margins = top_k(logits, num)
    for row, entry in enumerate(entries):
        for rank in range(num):
            token = int(entry[rank])
            if ids[row, rank] == NO_TOKEN:
                assert token == -1
                continue
            assert logits[row, token] == logits[row, ids[row, rank]]  # any of the equal ones
            if num == K:
                assert margin_of(entry[None], 0, rank) == margins[row, rank]
        actual = [token for token in entry[:num].tolist() if token >= 0]
        assert len(actual) == len(set(actual))


def test_processor_with_parameters_is_supported():
    """Sampling does not track gradients of the parameters."""

    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.tensor([0.0, 5.0, 0.0]))

        def forward(self, input_ids, scores):
            return scores + self.bias

    sampler = Sampler(TreeProcessors([Bias()], CPU), None, num_top_k=K)
    successors, _, entries = outcome(sampler, torch.tensor([[1.0, 0.0, 3.0]]))
    assert successors.tolist() == [1] and entries[0, :3].tolist() == [1, 2, 0]
