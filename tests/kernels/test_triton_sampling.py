"""Sampling kernels, interpreted if there is no GPU, compared with sampling on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.thinned import slow, thinned
from transformers.generation import logits_process as library

from lp_runtime.kernels.types import Noise, Packing
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling import packing, sampler
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.step_logits import StepLogits

kernels = pytest.importorskip("lp_runtime.kernels.triton_gpu", reason="needs Triton")
CHUNK = pytest.importorskip("lp_runtime.kernels.triton_sampling").CHUNK
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEEDS = ((5, 0), ((1 << 63) + 12345, 3), (1, 1))


@pytest.mark.parametrize(
    ("num", "kind", "size"),
    thinned(5, [1, 3, K], ["random", "equal", "few", "none", "infinite"], [5, CHUNK, 2 * CHUNK + 100]),
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes inf - inf
def test_greedy_tokens_and_candidates_match_the_cpu(num, kind, size):
    """They equal the successors and candidates that are found on a CPU."""
    scores = {
        "random": torch.randn(2, size, generator=torch.Generator().manual_seed(size)),
        "equal": torch.zeros(2, size),
        "few": torch.full((2, size), -torch.inf).index_fill_(1, torch.tensor([1, size - 1]), 1.0),
        "none": torch.full((2, size), -torch.inf),
        "infinite": torch.randn(2, size).index_fill_(1, torch.tensor([0, size - 2]), torch.inf),
    }[kind]
    width = 1 + (num + 1) // 2
    expected = np.zeros((2, width), dtype=np.int64)
    packing.pack_top_k(scores.numpy(), num, expected)
    expected[:, 0] = scores.argmax(-1)
    packed = kernels.sample_and_pack(scores.to(DEVICE), Packing(num, width))
    assert packed.tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_scores_give_a_valid_token():
    scores = torch.full((1, 7), torch.nan, device=DEVICE)
    for num, noise in ((K, None), (0, None), (K, Noise(1, 0, torch.tensor([3], device=DEVICE)))):
        assert 0 <= kernels.sample_and_pack(scores, Packing(num, 5), noise)[0, 0] < 7


@pytest.mark.parametrize(("seed", "size"), thinned(6, slow(SEEDS, [(1, 1)]), [7, CHUNK + 33]))
def test_gumbel_noise_equals_the_cpus_bitwise(seed, size):
    """With equal scores, only the noise decides; then one score is set so that its last bits decide."""
    positions = [0, 9, 4_000_000_000]
    expected = GumbelNoise(*seed, size, CPU).at(positions)
    noise = Noise(*seed, torch.tensor(positions, device=DEVICE))
    zeros = torch.zeros(3, size, device=DEVICE)
    assert kernels.sample_and_pack(zeros, Packing(0, 1), noise)[:, 0].tolist() == expected.argmax(-1).tolist()
    expected, noise, token = expected[1:2], Noise(*seed, noise.positions[1:2]), size - 2
    rival = int(expected[0].argmax())
    scores = torch.zeros(1, size)
    gap = expected[0, rival] - expected[0, token]
    for direction in (torch.inf, -torch.inf):
        scores[0, token] = gap
        for _ in range(3):
            scores[0, token] = torch.nextafter(scores[0, token], torch.tensor(direction))
            assert_same(scores, noise, expected)


def assert_same(scores: torch.Tensor, noise: Noise, expected: torch.Tensor) -> None:
    """Assert that the kernel samples the arg max of the scores and the CPU's noise."""
    actual = kernels.sample_and_pack(scores.to(DEVICE), Packing(0, 1), noise)[:, 0]
    assert actual.tolist() == (scores + expected).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("sizes", "num", "draws"),
    thinned(5, [(CHUNK + 1, CHUNK + 1, 9), (33, 33, 1), (CHUNK + 1, 50)], [0, K, 3], [False, True]),
)
def test_vocabulary_slices_match_the_whole_vocabulary(sizes, num, draws):
    size = sum(sizes)
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(size)).to(DEVICE)
    logits[1] = 0.0
    logits[2, 5:] = -torch.inf
    noise = Noise(9, 2, torch.tensor([0, 4, 77], device=DEVICE)) if draws else None
    packed = Packing(num, 1 + (num + 1) // 2)
    results, first = [], 0
    for each in logits.split(sizes, dim=1):
        results.append(kernels.find_in_slice(each, packed, noise, 1.25, first, sizes[0]))
        first += each.shape[1]
    actual = kernels.pack_candidates(torch.stack(results), packed, noise, size)
    assert actual.tolist() == kernels.sample_and_pack(logits, packed, noise, 1.25).tolist()


CUTS = [(None, 0.9), (50, None), (20, 0.8), (None, 0.0), (1, 0.5), (5000, 0.999)]


@pytest.mark.parametrize(
    ("dtype", "cut", "temperature"), thinned(7, [torch.float32, torch.bfloat16, torch.float16], CUTS, [0.5, 2.0])
)
def test_top_k_and_top_p_cut_matches_transformers(dtype, cut, temperature):
    """Tied scores are kept in the same number as in transformers: those that a stable sort puts last."""
    top_k, top_p = cut
    logits = 2 * torch.randn(1, 2500, generator=torch.Generator().manual_seed(1))
    if temperature > 1:
        logits = logits.round()  # many ties, at any boundary
    logits = logits.to(dtype)
    logits[0, 7], logits[0, 100:200] = -torch.inf, 0.0
    logits[0, 150] = -0.0
    scores = logits.float() / temperature
    if top_k is not None:
        scores = library.TopKLogitsWarper(top_k)(None, scores)
    num_kept = (scores > -torch.inf).sum(-1)
    if top_p is not None:
        num_kept = (library.TopPLogitsWarper(top_p)(None, scores) > -torch.inf).sum(-1)
        order = scores.sort(stable=True).indices
        ranks = torch.empty_like(order).scatter_(1, order, torch.arange(2500)[None])
        scores = scores.masked_fill(ranks < 2500 - num_kept[:, None], -torch.inf)
    cut = kernels.find_cut(logits.to(DEVICE), 1 / temperature, top_k, top_p)
    actual = kernels.cut_scores(logits.to(DEVICE), 1 / temperature, cut).cpu()
    assert (actual > -torch.inf).sum(-1).tolist() == num_kept.tolist()
    assert torch.equal(actual, scores)


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.3, marks=pytest.mark.slow)])
def test_top_k_keeps_scores_that_scaling_makes_equal(temperature):
    """Scaling may make adjacent float32 numbers equal; top_k then keeps all of them."""
    inverse = float(np.float32(1) / np.float32(temperature))
    base = torch.tensor(1.0)
    values = [base]
    while len(values) < 64:
        values.append(torch.nextafter(values[-1], torch.tensor(2.0)))
    logits = torch.stack(values)[None]
    expected = library.TopKLogitsWarper(10)(None, logits * inverse)
    logits = logits.to(DEVICE)
    actual = kernels.cut_scores(logits, inverse, kernels.find_cut(logits, inverse, 10, None))
    assert torch.equal(actual.cpu(), expected)


def test_can_cut_rejects_top_p_near_one_and_float64():
    assert kernels.can_cut(torch.bfloat16, None) and kernels.can_cut(torch.float32, 0.999)
    assert not kernels.can_cut(torch.float32, 0.99999) and not kernels.can_cut(torch.float64, 0.5)


WARPERS = [library.TemperatureLogitsWarper(0.5), library.TopKLogitsWarper(40), library.TopPLogitsWarper(0.9)]


@pytest.mark.parametrize(
    ("processors", "num_top_k", "with_top_k", "with_logprobs"),
    thinned(
        7,
        [WARPERS, [], [*WARPERS, library.MinPLogitsWarper(0.05)], WARPERS[::-1]],
        [0, K],
        [False, True],
        [False, True],
    ),
)
def test_sampler_with_kernels_matches_sampler_without(processors, num_top_k, with_top_k, with_logprobs, monkeypatch):
    tree = TokenTree([3], max_depth=4)
    tree.add_branch([1])
    logits = 2 * torch.randn(2, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    results = []
    for has_kernels in (False, True):
        monkeypatch.setattr(sampler, "kernels_for", lambda device, has=has_kernels: kernels if has else None)
        noise = GumbelNoise(7, 0, 300, DEVICE)
        one = sampler.Sampler(TreeProcessors(processors, DEVICE), noise, with_logprobs, num_top_k)
        packed, scores = one.sample(StepLogits(logits), tree, [0, 1], [5, 3], with_top_k)
        results.append((packed.tolist(), scores()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.slow
def test_another_top_k_does_not_recompile_the_kernel():
    """By default, Triton compiles separate variants for integers that are 1 or multiples of 16."""
    code = "from lp_runtime.kernels.triton_cut import _find_cut; print(_find_cut.do_not_specialize)"
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['top_k']"
