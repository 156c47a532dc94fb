"""Replacements of Triton's attention kernels: torch operations on the same table of addresses.

Each is a torch operator, so that a simulated GPU records it in a graph as one call, which reads the table at replay.
The kernels themselves are compared with float64 in tests/kernels.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from lp_runtime.kernels.triton_cut import can_cut
from lp_runtime.kernels.triton_experts import MAX_TOKENS, ExpertWeights
from lp_runtime.kernels.triton_router import can_choose
from lp_runtime.kernels.types import NO_TOKEN, Packing, Rotation, Routing
from lp_runtime.model.modules.fused_attention import rotate_some
from lp_runtime.sampling import packing as packing_of
from lp_runtime.sampling import sampler

HEADER = 4
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


def memory_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor at an address."""
    count = torch.Size(shape).numel()
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def sequences(table: Tensor, layer: int, heads: int, size: int, dtype: torch.dtype) -> Iterator[tuple]:
    """Yield (first, T, L, keys, values) of each sequence; keys and values are [heads, capacity, size]."""
    for row in table[:-1].tolist():
        first, count, length, capacity = row[:HEADER]
        if count:
            addresses = row[HEADER + 2 * layer : HEADER + 2 * layer + 2]
            assert length + count <= capacity and all(addresses)
            yield first, count, length, *(memory_at(each, (heads, capacity, size), dtype) for each in addresses)


@torch.library.custom_op("lp_stand_ins::write", mutates_args=("table",))
def write(key: Tensor, value: Tensor, owners: Tensor, table: Tensor, layer: int) -> None:
    _, heads, _, size = key.shape
    rows = table[owners]
    assert (owners.diff() >= 0).all() and (rows[:, 0] <= torch.arange(len(rows))).all()
    for first, count, length, *cache in sequences(table, layer, heads, size, key.dtype):
        for target, states in zip(cache, (key, value), strict=True):
            target[:, length : length + count] = states[0, :, first : first + count]


def rotated(states: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    """Rotate states without the cache of fused_attention.py, since replays reuse tensors with new contents."""
    if rotation.is_halved:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return rotate_some(states, cos, sin, rotation)


@torch.library.custom_op("lp_stand_ins::rotate_and_write", mutates_args=("table",))
def _rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, owners: Tensor, table: Tensor, layer: int,
    query_weight: Tensor | None, key_weight: Tensor | None, epsilon: float,
    are_neighbors: bool, angle_step: int, is_halved: bool,
) -> Tensor:  # fmt: skip
    size = query.shape[3]
    rotation = Rotation(are_neighbors, angle_step, is_halved)
    assert all(each.stride()[2:] == (size, 1) for each in (query, key, value))
    if query_weight is not None and key_weight is not None:
        query, key = norm(query, query_weight, epsilon), norm(key, key_weight, epsilon)
    write(rotated(key, cos, sin, rotation).transpose(1, 2), value.transpose(1, 2), owners, table, layer)
    return rotated(query, cos, sin, rotation).contiguous()


def rotate_and_write(*args: object) -> Tensor:
    return _rotate_and_write(*args[:-1], *args[-1])  # an operator takes no NamedTuple


def visible(lowest: Tensor, positions: Tensor, words: Tensor, first: int, count: int, length: int) -> Tensor:
    """Return [T, L + T] bool: the keys that each token of a sequence may see."""
    own, places = slice(first, first + count), torch.arange(count)
    is_ancestor = (words[own][:, places // 64] >> (places % 64)) & 1 != 0
    at = torch.cat([torch.arange(length), positions[own]])
    return torch.cat([is_ancestor.new_ones(count, length), is_ancestor], 1) & (at >= lowest[own, None])


@torch.library.custom_op("lp_stand_ins::attend", mutates_args=())
def attend(
    query: Tensor, num_heads: int, lowest: Tensor, positions: Tensor, words: Tensor, table: Tensor, layer: int,
    scale: float, num_processors: int, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    assert query.stride(3) == 1 and words.is_contiguous() and table.is_contiguous() and lowest.is_contiguous()
    _, num_queries, num_tokens, size = query.shape
    output = torch.zeros(1, num_tokens, num_queries, size, dtype=query.dtype)
    for first, count, length, *cache in sequences(table, layer, num_heads, size, query.dtype):
        keys, values = (each[:, : length + count].repeat_interleave(num_queries // num_heads, 0) for each in cache)
        hidden = ~visible(lowest, positions, words, first, count, length)
        scores = query[0, :, first : first + count].float() @ keys.float().transpose(1, 2) * scale
        weights = softmax(scores.masked_fill_(hidden, -torch.inf), sinks)
        output[0, first : first + count] = (weights @ values.float().nan_to_num_()).transpose(0, 1).to(query.dtype)
    return output


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of [heads, T, S] scores; each head may have a sink, whose weight is left out."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:2], 1)], 2).softmax(-1)[..., :-1]


@torch.library.custom_op("lp_stand_ins::attend_strictly", mutates_args=())
def attend_strictly(
    query: Tensor, num_heads: int, lowest: Tensor, positions: Tensor, paths: Tensor, owners: Tensor, table: Tensor,
    layer: int, scale: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend token by token, so that the shapes do not depend on what else is fed."""
    assert query.stride(3) == 1 and all(each.is_contiguous() for each in (paths, table, lowest, owners))
    _, num_queries, num_tokens, size = query.shape
    output = torch.zeros(1, num_tokens, num_queries, size, dtype=query.dtype)
    for first, count, _, *cache in sequences(table, layer, num_heads, size, query.dtype):
        for token in range(first, first + count):
            length, position, low = (int(each) for each in (paths[token, 0], positions[token], lowest[token]))
            path = [*range(length), *paths[token, 1 : 2 + position - length].tolist()]
            own = torch.tensor(path[low : position + 1])
            keys, values = (each[:, own].float().repeat_interleave(num_queries // num_heads, 0) for each in cache)
            scores = query[0, :, token, None].float() @ keys.transpose(1, 2) * scale
            output[0, token] = (softmax(scores, sinks) @ values)[:, 0].to(query.dtype)
    return output


@_rotate_and_write.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@attend.register_fake
@attend_strictly.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    return torch.empty(query.transpose(1, 2).shape, dtype=query.dtype, device=query.device)


def norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    normed = torch.nn.functional.rms_norm(states.float(), weight.shape, weight.float(), epsilon)
    return normed.to(states.dtype)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    assert gate_up.is_contiguous()
    first, second = gate_up.float().chunk(2, -1)
    return (ACTIVATIONS[activation](first) * second).to(gate_up.dtype)


def feed_experts(states: Tensor, experts: Tensor, scores: Tensor, weights: ExpertWeights) -> Tensor:
    """Compute all experts for all tokens, and keep the chosen ones."""
    assert states.is_contiguous()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    gate_up, down = weights.gate_up.to(scores.dtype), weights.down.to(scores.dtype)
    if weights.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    inner = torch.einsum("te,xfe->txf", states.to(scores.dtype), gate_up)
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias
    gate, up = (inner[..., ::2], inner[..., 1::2]) if weights.is_interleaved else inner.chunk(2, -1)
    if weights.activation == "clamped":
        gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
        inner = gate * torch.sigmoid(weights.alpha * gate) * (up + 1)
    else:
        inner = ACTIVATIONS[weights.activation](gate) * up
    outputs = torch.einsum("txf,xef->txe", inner, down)
    if weights.down_bias is not None:
        outputs = outputs + weights.down_bias
    chosen = torch.zeros_like(outputs[..., 0]).scatter(1, experts, scores)
    return torch.einsum("txe,tx->te", outputs, chosen).to(states.dtype)


def choose_experts(
    logits: Tensor, routing: Routing, dtype: torch.dtype, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    values = {"softmax": logits.float().softmax(-1), "sigmoid": logits.float().sigmoid()}.get(routing.scores, logits)
    ranked = values if correction is None else values + correction
    if routing.num_groups > 1:
        grouped = ranked.unflatten(-1, (routing.num_groups, -1))
        _, kept = grouped.topk(2, -1).values.sum(-1).topk(routing.num_kept, -1)
        is_kept = torch.zeros_like(grouped[..., 0]).scatter(1, kept, 1.0) > 0
        ranked = grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
    _, experts = torch.topk(ranked, routing.num_chosen, dim=-1)
    scores = values.gather(1, experts)
    if routing.scores == "softmax of chosen":
        scores = scores.float().softmax(-1)
    elif routing.normalizes:
        scores = scores / scores.sum(-1, keepdim=True)
    return (routing.scale * scores).to(dtype), experts


def packed(scores: Tensor, noisy: Tensor, packing: Packing) -> Tensor:
    """Return [n, width] arg max of noisy scores and top-k of scores, packed as in sampling/sampler.py."""
    ids, gaps = sampler.top_k(scores, packing.num or 1)
    words = torch.nn.functional.pad((ids << 8) | gaps, (0, packing.num % 2), value=NO_TOKEN << 8)
    actual = torch.zeros((len(scores), packing.width), dtype=torch.int64, device=scores.device)
    actual[:, 0] = noisy.argmax(-1)
    if packing.num:
        actual[:, 1 : 1 + words.shape[1] // 2] = words[:, 0::2] | (words[:, 1::2] << 32)
    return actual


def sample_greedily(logits: Tensor, packing: Packing) -> Tensor:
    assert logits.stride(1) == 1
    return packed(logits.float(), logits.float(), packing)


@torch.library.custom_op("lp_stand_ins::found_in_slice", mutates_args=())
def candidates_in_slice(scores: Tensor, noisy: Tensor, num: int, first: int) -> Tensor:
    """Return [n, 1 + K] arg max and top-k of a slice: a score and an id, half an integer each."""
    best_ids, best = np.empty((len(scores), num), np.int64), np.empty((len(scores), num), np.float32)
    packing_of.find_top_k(np.ascontiguousarray(scores.numpy()), num, best_ids, best)
    ids = torch.cat([noisy.argmax(-1, keepdim=True), torch.from_numpy(best_ids)], 1)
    values = torch.cat([noisy.max(-1, keepdim=True).values, torch.from_numpy(best)], 1)
    return (values.view(torch.int32).long() << 32) | (ids + first)


@torch.library.custom_op("lp_stand_ins::packed_of_slices", mutates_args=())
def packed_of_slices(result: Tensor, num: int, width: int) -> Tensor:
    """Return [n, width] packed results from those of slices, [P, n, 1 + K]."""
    words = result.transpose(0, 1)  # [n, P, 1 + K]
    ids, values = (words & 0xFFFFFFFF).numpy(), (words >> 32).int().view(torch.float32).numpy()
    packed = np.zeros((len(words), width), np.int64)
    packed[:, 0] = np.take_along_axis(ids[:, :, 0], values[:, :, 0].argmax(-1)[:, None], 1)[:, 0]
    if num:
        flat = (len(words), num * words.shape[1])
        packing_of.pack_candidates(ids[:, :, 1:].reshape(flat), values[:, :, 1:].reshape(flat), num, packed)
    return torch.from_numpy(packed)


KERNELS = SimpleNamespace(
    write=write,
    rotate_and_write=rotate_and_write,
    attend=attend,
    attend_strictly=attend_strictly,
    gate=gate,
    MAX_TOKENS=MAX_TOKENS,
    can_choose=can_choose,
    ExpertWeights=ExpertWeights,
    feed_experts=feed_experts,
    choose_experts=choose_experts,
    can_cut=can_cut,
    sample_and_pack=sample_greedily,
)
