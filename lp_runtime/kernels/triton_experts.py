"""Triton kernels of a mixture of experts, for the few tokens of a step: three launches in place of about twenty.

A program of the products computes some outputs of one expert for all tokens that chose it, and finds these tokens
itself: nothing is sorted, gathered or put back. An expert's weights are read once, unless many tokens chose it.
triton_router.py chooses the experts.

Letters: T tokens, E hidden size, F an expert's inner size, X experts, k experts that a token chooses. A *pair* is a
token and one of its experts; pair p is the (p % k)-th choice of token p / k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lp_runtime.kernels.early_launch import early_launch

MAX_TOKENS = 1024  # of a pass: every program compares all of its pairs
SEARCH_BLOCK = 128  # pairs that a program compares at a time
MIN_ROWS, MAX_ROWS = 16, 64  # pairs of an expert that a program computes at a time
MAX_ROWS_TRANSPOSED = 32  # more would need more registers than there are
FEW_PROGRAMS = 160  # fewer would leave multiprocessors idle: a product gets smaller tiles
SUM_BLOCK = 1024  # elements that a program sums
GELU_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
GELU_CUBE = tl.constexpr(0.044715)


class ExpertWeights(NamedTuple):
    """Weights of all experts, and how an expert's gate is computed.

    Attributes:
        gate_up: [X, 2 F, E], or [X, E, 2 F] if transposed.
        down: [X, E, F], or [X, F, E] if transposed.
        gate_up_bias: [X, 2 F]; None without biases.
        down_bias: [X, E]; None without biases.
        is_transposed: whether weights are stored with inputs first.
        is_interleaved: whether gate and up values alternate; otherwise all gates come first.
        activation: silu, gelu_tanh, or clamped: gpt-oss's, with `alpha` and `limit`.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    is_transposed: bool = False
    is_interleaved: bool = False
    activation: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0


@triton.jit
def _num_pairs_of(experts, expert, num_pairs, SEARCH: tl.constexpr):
    """Return how many of the first `num_pairs` pairs are an expert's."""
    count = 0
    for start in range(0, num_pairs, SEARCH):
        each = start + tl.arange(0, SEARCH)
        matches = tl.load(experts + each, mask=each < num_pairs, other=-1) == expert
        count += tl.sum(matches.to(tl.int32), 0)
    return count


@triton.jit
def _pairs_of(experts, expert, first, num_pairs, ROWS: tl.constexpr, SEARCH: tl.constexpr):
    """Return an expert's pairs from its `first`-th on, [ROWS]; missing ones are pair 0."""
    rows = tl.arange(0, ROWS)
    pairs = tl.zeros([ROWS], tl.int32)
    count = 0
    for start in range(0, num_pairs, SEARCH):
        each = start + tl.arange(0, SEARCH)
        matches = (tl.load(experts + each, mask=each < num_pairs, other=-1) == expert).to(tl.int32)
        ranks = tl.where(matches > 0, count + tl.cumsum(matches, 0) - 1 - first, -1)
        pairs += tl.sum(tl.where(ranks[None, :] == rows[:, None], each[None, :], 0), 1)
        count += tl.sum(matches, 0)
    return pairs


@triton.jit
def _expert_of(experts, num_pairs, BY_EXPERT: tl.constexpr, SEARCH: tl.constexpr):
    """Return the expert that a program computes, and how many pairs it has: none if another program computes it."""
    program = tl.program_id(0)
    expert = program.to(tl.int64)
    num_before = 0
    if not BY_EXPERT:  # a program for each pair; the first pair of an expert computes all of them
        expert = tl.load(experts + program)
        num_before = _num_pairs_of(experts, expert, program, SEARCH)
    count = 0
    if num_before == 0:
        count = _num_pairs_of(experts, expert, num_pairs, SEARCH)
    return expert, count


@triton.jit
def _product(
    weights, states, weight_step, is_weight, is_row, inner, size,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return [OUTPUTS, ROWS] products; `weights` and `states` point to their first BLOCK inputs."""
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, size, BLOCK):
        if IS_EVEN:
            left = tl.load(weights, mask=is_weight[:, None], other=0.0)
            right = tl.load(states, mask=is_row[None, :], other=0.0)
        else:
            in_row = start + inner < size
            left = tl.load(weights, mask=is_weight[:, None] & in_row[None, :], other=0.0)
            right = tl.load(states, mask=is_row[None, :] & in_row[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        weights += weight_step
        states += BLOCK
    return total


@triton.jit
def gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up, float32; `alpha` and `limit` are those of the activation "clamped"."""
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(gate * alpha) * (up + 1)
    inner = gate
    if ACTIVATION == "gelu_tanh":  # x (1 + tanh(y)) / 2 = x sigmoid(2 y)
        inner = 2 * GELU_SCALE * (gate + GELU_CUBE * gate * gate * gate)
    return gate * tl.sigmoid(inner) * up


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_product(
    states, weights, bias, experts, output, num_pairs, size, num_outputs, alpha, limit,
    CHOICES: tl.constexpr, BY_EXPERT: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_TRANSPOSED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of an expert's pairs by some of its weights.

    If IS_GATED, rows are tokens' and OUTPUTS weights give OUTPUTS / 2 gated values; otherwise rows are pairs'.
    """
    if EARLY:
        gdc_wait()
    expert, count = _expert_of(experts, num_pairs, BY_EXPERT, SEARCH)
    if count == 0:
        return
    num_weights = num_outputs * (2 if IS_GATED else 1)
    outs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_weight = outs < num_weights
    if IS_GATED and not IS_INTERLEAVED:  # gate and up values of an output become neighbours
        outs = (outs % 2) * num_outputs + outs // 2
    inner = tl.arange(0, BLOCK)
    weights += expert * num_weights * size
    if IS_TRANSPOSED:
        tile = weights + outs[:, None] + inner[None, :].to(tl.int64) * num_weights
    else:
        tile = weights + outs[:, None].to(tl.int64) * size + inner[None, :]
    weight_step = BLOCK * num_weights if IS_TRANSPOSED else BLOCK
    first = 0
    while first < count:
        pairs = _pairs_of(experts, expert, first, num_pairs, ROWS, SEARCH)
        is_row = first + tl.arange(0, ROWS) < count
        sources = (pairs // CHOICES if IS_GATED else pairs).to(tl.int64)
        source = states + sources[None, :] * size + inner[:, None]
        total = _product(tile, source, weight_step, is_weight, is_row, inner, size, OUTPUTS, ROWS, BLOCK, IS_EVEN)
        if HAS_BIAS:
            added = tl.load(bias + expert * num_weights + outs, mask=is_weight, other=0.0)
            total += added.to(tl.float32)[:, None]
        columns = outs
        if IS_GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, [OUTPUTS // 2, 2, ROWS]), [0, 2, 1]))
            total = gated(gate, up, alpha, limit, ACTIVATION)
            columns = tl.program_id(1) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        target = output + pairs[None, :].to(tl.int64) * num_outputs + columns[:, None]
        tl.store(target, total.to(output.dtype.element_ty), mask=(columns < num_outputs)[:, None] & is_row[None, :])
        first += ROWS


@triton.jit
def _sum_choices(outputs, scores, total, size, CHOICES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Add the outputs of a token's experts, each times its score."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    if EARLY:
        gdc_wait()
    row = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        score = tl.load(scores + pair).to(tl.float32)
        row += score * tl.load(outputs + pair * size + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + token * size + places, row.to(total.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """Sizes of a program: it computes `outputs` products of each row, from `block` inputs at a time."""

    outputs: int
    block: int
    num_warps: int
    num_stages: int


def tile_of(rows: int, num_pairs: int, num_weights: int, bytes_per_value: int, is_interleaved: bool) -> Tile:
    """Return the tile of a product, chosen by a sweep on an H200 (docs/decisions/gpu.md).

    Args:
        rows: pairs that a program computes at a time.
        num_pairs: pairs of the pass.
        num_weights: products of a pair.
        bytes_per_value: of the weights' dtype.
        is_interleaved: whether gate and up values alternate.
    """
    if bytes_per_value > 2:
        return Tile(32, 64, 4, 2)
    if is_interleaved:
        return Tile(128, 32, 4, 4)
    tile = Tile(64, 64, 4, 5 if rows < MAX_ROWS else 4)
    return Tile(16, 128, 2, 4) if num_pairs * triton.cdiv(num_weights, tile.outputs) < FEW_PROGRAMS else tile


def feed_experts(
    states: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """Return the outputs of tokens' experts, added with their scores: [T, E].

    Products and sums are in float32; an expert's inner values and its outputs are rounded to the model's dtype.

    Args:
        states: [T, E] of the weights' dtype, contiguous.
        experts: [T, k] int64; T at most MAX_TOKENS.
        scores: [T, k] by which the outputs are multiplied.
    """
    num_tokens, size = states.shape
    choices = experts.shape[1]
    experts, scores = experts.contiguous(), scores.contiguous()
    inner = multiply(states, experts, weights, is_gated=True)
    outputs = multiply(inner, experts, weights, is_gated=False)
    total = torch.empty_like(states)
    block = min(SUM_BLOCK, triton.next_power_of_2(size))
    _sum_choices[(num_tokens, triton.cdiv(size, block))](
        outputs, scores, total, size, CHOICES=choices, BLOCK=block, **early_launch(states.device)
    )
    return total


def multiply(states: torch.Tensor, experts: torch.Tensor, weights: ExpertWeights, is_gated: bool) -> torch.Tensor:
    """Return every pair's product with its expert's weights.

    Args:
        states: [T, E] if `is_gated`; otherwise [T k, F].
        experts: [T, k] int64, contiguous.
        is_gated: whether to compute the experts' inner values, [T k, F], or their outputs, [T k, E].
    """
    num_pairs, num_experts = experts.numel(), len(weights.down)
    weight, bias = (weights.gate_up, weights.gate_up_bias) if is_gated else (weights.down, weights.down_bias)
    size = states.shape[1]
    num_weights = weight.shape[2 if weights.is_transposed else 1]
    num_outputs = num_weights // 2 if is_gated else num_weights
    output = states.new_empty(num_pairs, num_outputs)
    rows = triton.next_power_of_2(max(1, 4 * num_pairs // num_experts))
    max_rows = MAX_ROWS_TRANSPOSED if weights.is_transposed else MAX_ROWS
    rows = max(MIN_ROWS, min(max_rows, rows, triton.next_power_of_2(len(experts))))
    is_interleaved = is_gated and weights.is_interleaved
    tile = tile_of(rows, num_pairs, num_weights, states.element_size(), is_interleaved)
    _expert_product[(min(num_pairs, num_experts), triton.cdiv(num_weights, tile.outputs))](
        states, weight, weight if bias is None else bias, experts, output, num_pairs, size, num_outputs,
        weights.alpha, weights.limit, CHOICES=experts.shape[1], BY_EXPERT=num_pairs > num_experts, IS_GATED=is_gated,
        ACTIVATION=weights.activation, HAS_BIAS=bias is not None, IS_TRANSPOSED=weights.is_transposed,
        IS_INTERLEAVED=is_interleaved, IS_EVEN=size % tile.block == 0, ROWS=rows,
        OUTPUTS=tile.outputs, BLOCK=tile.block, SEARCH=SEARCH_BLOCK, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **early_launch(states.device),
    )  # fmt: skip
    return output
