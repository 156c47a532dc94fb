"""Fused attention of a decoder layer: one product for queries, keys and values, and one operation for rotations.

fusing.py puts it into a model.

Letters: T tokens, E hidden size, H key/value heads, g query heads for each, D head size; R dimensions of a head that
are rotated.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lp_runtime.kernels import numba_cpu
from lp_runtime.kernels.types import Rotation
from lp_runtime.model.hf.config import attention_of
from lp_runtime.model.kv_cache.batch import DeviceCache
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.modules.fused_blocks import Block, FusedNorm, merge


class FusedAttention(nn.Module):
    """Attention of a decoder layer, [1, T, E] to [1, T, E], with one merged QKV projection.

    One matmul computes queries, keys and values, [..., (g + 2) H D]. Queries and keys are rotated in one operation;
    where a kernel does that, it also normalizes queries and keys before, if the model does, and writes keys and values
    into the cache. Replaces blocks with LlamaAttention's attributes, as Mistral's and Qwen's have, with sinks as
    gpt-oss's, or with Phi3Attention's, where the three projections are one already. `rotation` is how the block that is
    replaced rotates queries and keys.
    """

    def __init__(self, attention: Block, rotation: Rotation):
        super().__init__()
        self.rotation = rotation
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.num_key_value_groups: int = attention.num_key_value_groups
        self.is_causal = attention.is_causal
        if hasattr(attention, "qkv_proj"):
            self.qkv_proj = attention.qkv_proj
            num_heads = self.qkv_proj.out_features // self.head_dim // (self.num_key_value_groups + 2)
            num_queries = num_heads * self.num_key_value_groups
        else:
            self.qkv_proj = merge(attention.q_proj, attention.k_proj, attention.v_proj)
            num_heads = attention.k_proj.out_features // self.head_dim
            num_queries = attention.q_proj.out_features // self.head_dim
        self._sizes = (num_queries, num_heads, num_heads)
        self.o_proj = attention.o_proj
        self.q_norm: nn.Module | None = getattr(attention, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(attention, "k_norm", None)
        self.sinks: nn.Parameter | None = getattr(attention, "sinks", None)  # [g H] attention sinks
        self.sliding_window: int | None = getattr(attention, "sliding_window", None)  # in tokens

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cosines and sines, [1, T, columns] each; see Rotation
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,  # name of `cache` before transformers 5.24
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [1, T, E], the attention function's weights), like the block that this one replaces."""
        cache = past_key_values if cache is None else cache
        shape = hidden_states.shape[:-1]
        states = self.qkv_proj(hidden_states).view(*shape, -1, self.head_dim)
        if isinstance(cache, DeviceCache):
            query, key, value = self._rotated_on_device(states, position_embeddings, cache)
        else:
            query, key, value = self._rotated(states, position_embeddings, cache)
        attend = ALL_ATTENTION_FUNCTIONS[attention_of(self.config)]
        options = {"dropout": 0.0, "scaling": self.scaling, **kwargs}
        if self.sinks is not None:
            options |= {"s_aux": self.sinks, "sliding_window": self.sliding_window}
        output, weights = attend(self, query, key, value, attention_mask, **options)
        return self.o_proj(output.reshape(*shape, -1)), weights

    def _rotated_on_device(
        self, states: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], cache: DeviceCache
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate queries and keys and write keys and values into the cache, in one kernel.

        Takes [1, T, (g + 2) H, D]; returns rotated queries, [1, g H, T, D], and the keys and values of these tokens.
        """
        query, key, value = states.split(self._sizes, 2)
        norms = self._norms_of_rotation()
        if norms is None:
            query, key, value = self._norm(query, key, value)
        query = cache.rotate_and_write(query, key, value, factors, self.layer_idx, self.rotation, norms)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return query, key, value

    def _rotated(
        self, states: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, and write keys and values into a cache, if there is one.

        Takes [1, T, (g + 2) H, D]; returns queries, [1, g H, T, D], and the cache's whole keys and values.
        """
        cos, sin = map(_doubled, factors) if self.rotation.is_halved else factors
        is_whole = not self.rotation.are_neighbors and cos.shape[-1] == self.head_dim
        if isinstance(cache, TreeCache) and is_whole and numba_cpu.supports(states):
            return self._rotated_on_host(states, cos, sin, cache)
        turn = rotate if is_whole else functools.partial(rotate_some, rotation=self.rotation)
        num_queries, num_keys, _ = self._sizes
        if self.q_norm is not None:
            query, key, value = self._norm(*states.split(self._sizes, 2))
            query, key = turn(query, cos, sin), turn(key, cos, sin)
        else:
            query, key = turn(states[:, :, : num_queries + num_keys], cos, sin).split((num_queries, num_keys), 2)
            value = states[:, :, num_queries + num_keys :]
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return query, key, value

    def _rotated_on_host(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: TreeCache
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate queries and keys and write keys and values into the cache, with the CPU kernels.

        Takes [1, T, (g + 2) H, D]; returns rotated queries, [1, g H, T, D], and the cache's whole keys and values.
        """
        num_queries, num_keys, _ = self._sizes
        query = key = value = states.numpy()
        first = (0, num_queries, num_queries + num_keys)
        if self.q_norm is not None:
            normed = self._norm(*(each.contiguous() for each in states.split(self._sizes, 2)))
            query, key, _ = (each.numpy() for each in normed)
            first = (0, 0, first[2])
        cos_array, sin_array = numba_cpu.array_of(cos), numba_cpu.array_of(sin)
        start, arrays = cache.place, cache.arrays(self.layer_idx, num_keys, self.head_dim)
        sizes = (num_queries, num_keys)
        rotated = numba_cpu.rotate_and_write(query, key, value, first, sizes, cos_array, sin_array, start, *arrays)
        keys, values = (each.narrow(2, 0, start + states.shape[1]) for each in cache.tensors(self.layer_idx))
        return rotated, keys, values

    def _norms_of_rotation(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Return the norms of queries and keys, as `DeviceCache.rotate_and_write` computes them; None if it cannot."""
        query_norm, key_norm = self.q_norm, self.k_norm
        if not (isinstance(query_norm, FusedNorm) and isinstance(key_norm, FusedNorm)):
            return None
        is_equal = query_norm.epsilon == key_norm.epsilon
        return (query_norm.factors, key_norm.factors, query_norm.epsilon) if is_equal else None

    def _norm(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalize queries and keys, [1, T, heads, D] each, if the model does (Qwen3); return all three."""
        if self.q_norm is None or self.k_norm is None:
            return query, key, value
        return self.q_norm(query), self.k_norm(key), value


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to x, [1, T, heads, D]: x cos + (-x2, x1) sin, x1 and x2 the halves of x."""
    half = states.shape[-1] // 2
    return torch.addcmul(states * cos.unsqueeze(2), states.roll(half, -1), _signed(sin))


def rotate_some(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply rotary embedding to the first R dimensions of heads, [1, T, heads, D]; `cos` and `sin` are [1, T, R]."""
    num_rotated = cos.shape[-1]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rotated, rest = states[..., :num_rotated], states[..., num_rotated:]
    if rotation.angle_step == 2:  # Cohere rounds once, at the end
        rotated = rotated.float()
    if rotation.are_neighbors:
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
        if rotation.angle_step == 1:
            cos, sin = (each[..., : num_rotated // 2].repeat_interleave(2, -1) for each in (cos, sin))
        turned = torch.stack((-second, first), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat(((rotated * cos + turned * sin).to(states.dtype), rest), -1)


@functools.lru_cache(maxsize=4)  # tensors hash by identity: all layers of a pass receive the same factors
def _doubled(factors: torch.Tensor) -> torch.Tensor:
    """Repeat cosines or sines for the second half of a head: [1, T, D / 2] to [1, T, D]."""
    return torch.cat((factors, factors), -1)


@functools.lru_cache(maxsize=4)  # see above
def _signed(sin: torch.Tensor) -> torch.Tensor:
    """Negate the first half of the sines: [1, T, D] to [1, T, 1, D]."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1).unsqueeze(2)
