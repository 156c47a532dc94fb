"""Triton's kernels of a mixture of experts, compared with float64: interpreted if there is no GPU."""

from __future__ import annotations

import pytest
import torch
from support import stand_ins
from support.thinned import thinned

from lp_runtime.kernels.types import Routing

kernels = pytest.importorskip("lp_runtime.kernels.triton_experts", reason="needs Triton")
router = pytest.importorskip("lp_runtime.kernels.triton_router", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter has no products in bfloat16
if DEVICE == "cuda":
    TOLERANCES[torch.bfloat16] = 3e-2


def random_weights(num_experts, size, inner, dtype, activation):
    """Return random weights, stored as gpt-oss's if the activation is its own."""
    is_clamped = activation == "clamped"
    shapes = [(num_experts, 2 * inner, size), (num_experts, size, inner)]
    weights = [torch.randn(shape, dtype=dtype, device=DEVICE) / 4 for shape in shapes]
    if not is_clamped:
        return kernels.ExpertWeights(*weights, activation=activation)
    weights = [each.transpose(1, 2).contiguous() for each in weights]
    biases = [torch.randn(num_experts, width, dtype=dtype, device=DEVICE) for width in (2 * inner, size)]
    return kernels.ExpertWeights(*weights, *biases, True, True, activation, alpha=1.7, limit=1.0)


def random_choices(num_tokens, num_experts, num_chosen):
    return torch.stack([torch.randperm(num_experts, device=DEVICE)[:num_chosen] for _ in range(num_tokens)])


CASES = (  # tokens, chosen experts, experts, hidden size, inner size, activation
    (1, 2, 8, 64, 48, "silu"),  # fewer pairs than experts
    (4, 2, 3, 72, 40, "gelu_tanh"),  # sizes that no block divides
    (5, 2, 9, 48, 32, "clamped"),  # pairs that share experts, with experts left over
    (36, 2, 2, 64, 32, "clamped"),  # more pairs of an expert than a program computes at a time
    pytest.param((70, 2, 2, 32, 24, "silu"), marks=pytest.mark.slow),  # likewise
)


@pytest.mark.parametrize(("case", "dtype"), thinned(2, CASES, TOLERANCES))
def test_experts_match_float64_reference(case, dtype):
    num_tokens, num_chosen, num_experts, size, inner, activation = case
    torch.manual_seed(num_tokens)
    weights = random_weights(num_experts, size, inner, dtype, activation)
    states = torch.randn(num_tokens, size, device=DEVICE).to(dtype)
    experts = random_choices(num_tokens, num_experts, num_chosen)
    scores = torch.rand(num_tokens, num_chosen, device=DEVICE)
    exact = [each.double() if isinstance(each, torch.Tensor) else each for each in weights]
    expected = stand_ins.feed_experts(states.double(), experts, scores.double(), kernels.ExpertWeights(*exact))
    actual = kernels.feed_experts(states, experts, scores.to(dtype), weights)
    assert actual.dtype == dtype
    difference = (actual.double() - expected).norm() / expected.norm()
    assert difference <= TOLERANCES[dtype]


ROUTINGS = {
    "mixtral": (8, Routing(2)),
    "qwen3": (128, Routing(8, normalizes=False)),
    "gpt_oss": (60, Routing(4, "softmax of chosen")),
    "glm": (60, Routing(5, "sigmoid", scale=2.5)),
    "deepseek": (64, Routing(6, "sigmoid", scale=2.5, num_groups=8, num_kept=3)),
    "one group": (32, Routing(3, "sigmoid", normalizes=False, num_groups=4, num_kept=1)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_router_matches_softmax_and_top_k(name):
    num_experts, routing = ROUTINGS[name]
    assert router.can_choose(num_experts, routing)
    torch.manual_seed(0)
    logits = 2 * torch.randn(3, num_experts, device=DEVICE)
    correction = torch.randn(num_experts, device=DEVICE) if routing.scores == "sigmoid" else None
    expected_scores, expected = stand_ins.choose_experts(logits, routing, torch.float32, correction)
    scores, experts = router.choose_experts(logits, routing, torch.float32, correction)
    assert torch.equal(experts, expected) and experts.dtype == torch.int64
    torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-6)


def test_groups_need_powers_of_two():
    assert not router.can_choose(60, Routing(4, "sigmoid", num_groups=4, num_kept=2))
    assert not router.can_choose(64, Routing(4, "sigmoid", num_groups=3, num_kept=2))
    assert not router.can_choose(2 * router.MAX_EXPERTS, Routing(4))


def test_equal_scores_choose_the_first_experts():
    logits = torch.zeros(2, 6, device=DEVICE)
    logits[1, 4] = 1.0
    _, experts = router.choose_experts(logits, Routing(3), torch.float32)
    assert experts.tolist() == [[0, 1, 2], [4, 0, 1]]


@pytest.mark.parametrize("scores", ["softmax", "softmax of chosen", "sigmoid"])
def test_logits_that_are_not_numbers_choose_existing_experts(scores):
    logits = torch.full((2, 5), torch.nan, device=DEVICE)
    logits[1, :4] = -torch.inf
    _, experts = router.choose_experts(logits, Routing(3, scores), torch.float32)
    assert ((experts >= 0) & (experts < 5)).all()
