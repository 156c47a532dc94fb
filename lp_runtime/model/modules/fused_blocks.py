"""Fused norm, MLP and decoder layer: transformers' results in fewer, larger operations.

fusing.py puts them into a model; fused_attention.py has the attention of a layer.

Letters: T tokens, E hidden size, F the MLP's inner size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from lp_runtime.kernels import numba_cpu
from lp_runtime.kernels.dispatch import kernels_for

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
        self.gate_up_proj = mlp.gate_up_proj if is_merged else merge(mlp.gate_proj, mlp.up_proj)
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


def merge(*linears: nn.Linear) -> nn.Linear:
    first, num_outputs = linears[0], sum(each.out_features for each in linears)
    merged = nn.Linear(first.in_features, num_outputs, first.bias is not None, device="meta", dtype=first.weight.dtype)
    merged.weight = nn.Parameter(torch.cat([each.weight.detach() for each in linears]), requires_grad=False)
    if first.bias is not None:
        merged.bias = nn.Parameter(torch.cat([each.bias.detach() for each in linears]), requires_grad=False)
    return merged
