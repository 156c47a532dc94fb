"""Triton kernel of a mixture's router: everything after its product, in one launch.

Letters: T tokens, X experts, k experts that a token chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lp_runtime.kernels.early_launch import early_launch
from lp_runtime.kernels.types import Routing

MAX_EXPERTS = 1024  # whose scores a program can hold in registers


@triton.jit
def _in_best_groups(ranked, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ranks, [BLOCK], with -inf outside of the groups whose two best experts have the largest sums."""
    grouped = tl.reshape(ranked, [GROUPS, BLOCK // GROUPS])
    places, groups = tl.arange(0, BLOCK // GROUPS)[None, :], tl.arange(0, GROUPS)
    best = tl.max(grouped, 1)
    place = tl.min(tl.where(grouped == best[:, None], places, BLOCK), 1)
    left = best + tl.max(tl.where(places == place[:, None], float("-inf"), grouped), 1)
    is_kept = groups < 0
    for _ in tl.static_range(KEPT):
        group = tl.min(tl.where(left == tl.max(left, 0), groups, GROUPS), 0)
        is_kept = is_kept | (groups == group)
        left = tl.where(groups == group, float("-inf"), left)
    return tl.reshape(tl.where(is_kept[:, None], grouped, float("-inf")), [BLOCK])


@triton.jit
def _choose(
    logits, correction, scores, experts, num_experts, scale, CHOICES: tl.constexpr, PLACES: tl.constexpr,
    SCORES: tl.constexpr, NORMALIZES: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token: the best ranks, the first of equal ones."""
    token = tl.program_id(0).to(tl.int64)
    each, places = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    is_expert = each < num_experts
    if EARLY:
        gdc_wait()
    values = tl.load(logits + token * num_experts + each, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SCORES == "softmax":
        powers = tl.exp(values - tl.max(values, 0))
        values = powers / tl.sum(powers, 0)
    elif SCORES == "sigmoid":
        values = tl.sigmoid(values)
    ranked = values
    if HAS_CORRECTION:
        ranked += tl.load(correction + each, mask=is_expert, other=0.0).to(tl.float32)
    ranked = tl.where(is_expert, ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _in_best_groups(ranked, GROUPS, KEPT, BLOCK)
    best = tl.full([PLACES], float("-inf"), tl.float32)
    chosen = tl.zeros([PLACES], tl.int32)
    for choice in tl.static_range(CHOICES):
        expert = tl.min(tl.where(ranked == tl.max(ranked, 0), each, num_experts - 1), 0)
        expert = tl.minimum(expert, num_experts - 1)  # of logits that are NaN, any
        best = tl.where(places == choice, tl.sum(tl.where(each == expert, values, 0.0), 0), best)
        chosen = tl.where(places == choice, expert, chosen)
        ranked = tl.where(each == expert, float("-inf"), ranked)
    is_one = places < CHOICES
    if SCORES == "softmax of chosen":
        powers = tl.exp(best - tl.max(best, 0))
        best = powers / tl.sum(powers, 0)
    elif NORMALIZES:
        best = best / (tl.sum(tl.where(is_one, best, 0.0), 0) + (1e-20 if SCORES == "sigmoid" else 0.0))
    tl.store(scores + token * CHOICES + places, (best * scale).to(scores.dtype.element_ty), mask=is_one)
    tl.store(experts + token * CHOICES + places, chosen.to(tl.int64), mask=is_one)


def can_choose(num_experts: int, routing: Routing) -> bool:
    """Whether `choose_experts` supports a router: up to MAX_EXPERTS experts, of a power of two if they have groups."""
    is_power = num_experts == triton.next_power_of_2(num_experts) and routing.num_groups & (routing.num_groups - 1) == 0
    return num_experts <= MAX_EXPERTS and (routing.num_groups == 1 or is_power)


def choose_experts(
    logits: torch.Tensor, routing: Routing, dtype: torch.dtype, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts, as (scores of `dtype`, int64 experts), [T, k] each.

    Args:
        logits: [T, X] contiguous.
        routing: the rule; see `can_choose`.
        dtype: of the scores.
        correction: [X] added to scores when experts are chosen; None for nothing.
    """
    num_tokens, num_experts = logits.shape
    scores = torch.empty(num_tokens, routing.num_chosen, dtype=dtype, device=logits.device)
    experts = torch.empty(num_tokens, routing.num_chosen, dtype=torch.int64, device=logits.device)
    _choose[(num_tokens,)](
        logits, logits if correction is None else correction, scores, experts, num_experts, routing.scale,
        CHOICES=routing.num_chosen, PLACES=triton.next_power_of_2(routing.num_chosen), SCORES=routing.scores,
        NORMALIZES=routing.normalizes, HAS_CORRECTION=correction is not None, GROUPS=routing.num_groups,
        KEPT=routing.num_kept, BLOCK=triton.next_power_of_2(num_experts), num_warps=1, **early_launch(logits.device),
    )  # fmt: skip
    return scores, experts
