"""Fused norm, MLP, attention and decoder layer: transformers' results in fewer, larger operations.

fusing.py puts them into a model.

Letters: T tokens, L committed tokens, E hidden size, H key/value heads, g query heads for each, D head size, F the
MLP's inner size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lp_runtime.kernels import numba_cpu
from lp_runtime.kernels.dispatch import kernels_for
from lp_runtime.kernels.types import Rotation
from lp_runtime.model.hf.config import attention_of
from lp_runtime.model.kv_cache.batch import DeviceCache
from lp_runtime.model.kv_cache.cache import TreeCache

Block = Any  # an nn.Module; not typed as one, because torch declares its attributes as Tensor | Module
ACTIVATIONS = {  # gates that the kernels compute, and their modules
    "silu": (nn.SiLU, type(ACT2FN["silu"])),
    "gelu_tanh": (type(ACT2FN["gelu_pytorch_tanh"]),),
}


class FusedNorm(nn.Module):
    """RMS normalization over the last dimension, computed in float32; shares the weight of the norm that it replaces.

    `adds_one` is for models whose norms multiply by 1 + weight (Gemma).
    """

    def __init__(self, norm: Block, adds_one: bool = False):
        super().__init__()
        self.weight = norm.weight
        self.epsilon: float = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        # [E], by which normalized states are multiplied: in the model's dtype, or in float32.
        self.factors: torch.Tensor = 1.0 + norm.weight.detach().float() if adds_one else norm.weight.detach()
        self._shape = tuple(norm.weight.shape)
        # x w / sqrt(|x|^2 / E + epsilon) = x (w sqrt(E)) / hypot(|x|, sqrt(E epsilon)): four operations.
        scale = torch.tensor(float(norm.weight.numel())).sqrt()
        self._scaled = self.factors.float() * scale
        self._on_host = self.factors.float().numpy() if norm.weight.is_cpu else None
        self._least = (scale * self.epsilon**0.5).to(norm.weight.device)
        self._kernels = kernels_for(norm.weight.device)
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None  # (sum, normalized sum), set by add_ahead

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._ahead is not None:
            (total, normed), self._ahead = self._ahead, None
            if total is hidden_states:  # else the model passed on another tensor than the sum
                return normed
        if hidden_states.is_cuda and self.factors.dtype == hidden_states.dtype:
            return nn.functional.rms_norm(hidden_states, self._shape, self.factors, self.epsilon)  # a single kernel
        if self._kernels is not None and self._kernels.can_norm(hidden_states, self.factors):
            return self._kernels.norm(hidden_states, self.factors, self.epsilon)
        if self._on_host is not None and numba_cpu.supports(hidden_states):
            return numba_cpu.norm(hidden_states, self._on_host, self.epsilon)
        length = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True, dtype=torch.float32)
        normed = (hidden_states * self._scaled).div_(torch.hypot(length, self._least))
        return normed.to(hidden_states.dtype)

    def after_adding(
        self, states: torch.Tensor, added: torch.Tensor, added_norm: FusedNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add two tensors and normalize the sum: return (sum, normalized sum), [..., E] each.

        `added_norm` normalizes `added` first.
        """
        if self._kernels is not None and self._kernels.can_add_and_norm(states, added, self.factors):
            if added_norm is None:
                return self._kernels.add_and_norm(states, added, self.factors, self.epsilon)
            if added_norm.epsilon == self.epsilon:
                return self._kernels.add_and_norm(states, added, self.factors, self.epsilon, added_norm.factors)
        if added_norm is not None:
            added = added_norm(added)
        if self._on_host is not None and numba_cpu.supports(states) and numba_cpu.supports(added):
            return numba_cpu.add_and_norm(states, added, self._on_host, self.epsilon)
        total = states + added
        return total, self(total)

    def add_ahead(self, states: torch.Tensor, added: torch.Tensor, added_norm: FusedNorm | None = None) -> torch.Tensor:
        """Return states + added, and keep its normalized form for a `forward` called with this very sum.

        The layer before the norm thus adds and normalizes in one operation, although the model passes on only the sum.
        """
        self._ahead = self.after_adding(states, added, added_norm)
        return self._ahead[0]


class FusedMLP(nn.Module):
    """Gated MLP, [..., E] to [..., E], whose gate and up projections are one matmul, [..., 2 F].

    Replaces blocks with LlamaMLP's attributes, or with Phi3MLP's, where the two projections are one already.
    """

    def __init__(self, mlp: Block):
        super().__init__()
        is_merged = hasattr(mlp, "gate_up_proj")
        self.gate_up_proj = mlp.gate_up_proj if is_merged else _merge(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.activation_fn if is_merged else mlp.act_fn
        self._activation = next((name for name, kinds in ACTIVATIONS.items() if isinstance(self.act_fn, kinds)), None)
        self._kernels = kernels_for(self.gate_up_proj.weight.device) if self._activation is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        if self._kernels is not None:
            return self.down_proj(self._kernels.gate(gate_up, self._activation))
        gate, up = gate_up.chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


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
            self.qkv_proj = _merge(attention.q_proj, attention.k_proj, attention.v_proj)
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


class LayerNorms(NamedTuple):
    """Names of a decoder layer's norms besides `input_layernorm`; None for those that it does not have."""

    after_attention: str | None
    before_mlp: str
    after_mlp: str | None

    @property
    def names(self) -> list[str]:
        return [each for each in self if each is not None]

    def of(self, layer: Block) -> list[Any]:
        """Return the three norms; None for those that the layer does not have."""
        return [None if each is None else getattr(layer, each) for each in self]


LAYER_NORMS = (
    LayerNorms(None, "post_attention_layernorm", None),  # Llama's
    LayerNorms("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma 2's
    LayerNorms("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM 4's
)


def norms_of(layer: nn.Module) -> LayerNorms | None:
    """Return the names of a layer's norms; None if it does not have exactly the norms of one of LAYER_NORMS."""
    names = {name for name, _ in layer.named_children() if name.endswith("layernorm")}
    return next((each for each in LAYER_NORMS if {"input_layernorm", *each.names} == names), None)


class FusedLayer(nn.Module):
    """Decoder layer, [1, T, E] to [1, T, E], made of FusedNorm, FusedAttention and any MLP.

    Shares the blocks of the layer that it replaces; norms and attention must be fused already. In some models (Gemma 2
    and 3, GLM 4), norms also follow attention and MLP, before the additions. If `precede` has named the norm that
    follows the layer, the layer's last addition computes that norm too.
    """

    def __init__(self, layer: Block):
        super().__init__()
        norms = norms_of(layer)
        assert norms is not None
        for name in ("input_layernorm", "self_attn", "mlp", *norms.names):
            setattr(self, name, getattr(layer, name))
        self._norms: LayerNorms = norms
        if hasattr(layer, "attention_type"):  # some models read this attribute of their layers
            self.attention_type = layer.attention_type
        self._next_norm: tuple[FusedNorm, ...] = ()  # in a tuple, so that torch does not register it as a submodule

    def precede(self, norm: FusedNorm) -> None:
        """Fuse `norm`, which normalizes this layer's output, with the layer's last addition."""
        self._next_norm = (norm,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert position_embeddings is not None
        layer = cast(Any, self)
        after_attention, norm, after_mlp = self._norms.of(layer)
        # Call the forward methods directly: nn.Module.__call__ takes as long as some of the blocks.
        normed = layer.input_layernorm.forward(hidden_states)
        cache = past_key_values if cache is None else cache
        output, _ = layer.self_attn.forward(normed, position_embeddings, attention_mask, cache, **kwargs)
        hidden_states, normed = norm.after_adding(hidden_states, output, after_attention)
        output = layer.mlp.forward(normed)
        if isinstance(output, tuple):  # a mixture of experts may also return scores
            output = output[0]
        if self._next_norm:
            return self._next_norm[0].add_ahead(hidden_states, output, after_mlp)
        return hidden_states + (output if after_mlp is None else after_mlp(output))


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


def _merge(*linears: nn.Linear) -> nn.Linear:
    first, num_outputs = linears[0], sum(each.out_features for each in linears)
    merged = nn.Linear(first.in_features, num_outputs, first.bias is not None, device="meta", dtype=first.weight.dtype)
    merged.weight = nn.Parameter(torch.cat([each.weight.detach() for each in linears]), requires_grad=False)
    if first.bias is not None:
        merged.bias = nn.Parameter(torch.cat([each.bias.detach() for each in linears]), requires_grad=False)
    return merged
