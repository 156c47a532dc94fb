"""Weights of a big model that computes the same function as a small one; see inflate_model.py."""

from __future__ import annotations

import torch
from inflation_shapes import Hybrid, Kind, Shape, check, head_places

MAMBA_EXPAND, MAMBA_STATE, MAMBA_HEAD_DIM, MAMBA_KERNEL = 2, 128, 64, 4  # those of Granite 4


class Inflation:
    """Makes the big model's weights one after the other.

    Args:
        small: the small model's shape.
        big: the big model's shape.
        dtype: dtype of the big model.
        device: where the weights are made.
        seed: seed of random weights, which depend on the device, too.
        kind: kind of the MLPs, or of some of the layers.
    """

    def __init__(
        self,
        small: Shape,
        big: Shape,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        kind: Kind = None,
    ):
        check(small, big, kind)
        self._kind = kind
        self.small, self.big, self.dtype, self.device = small, big, dtype, device
        self._random = torch.Generator(device).manual_seed(seed)
        self._places = head_places(small, big)
        # Rotary pairs are (i, i + head_dim / 2): pair i of the small head has the frequency of pair i * growth.
        growth, half = big.head_dim // small.head_dim, small.head_dim // 2
        pairs = torch.arange(half) * growth
        self._rotary = torch.cat([pairs, pairs + big.head_dim // 2]).to(device)

    def noise(self, rows: int, columns: int) -> torch.Tensor:
        """Return [rows, columns] random weights, scaled so that unit inputs give outputs of about unit size."""
        # `dtype` instead of float32: a 34B model's layer needs half the memory, and the values do not matter.
        drawn = torch.randn(rows, columns, generator=self._random, device=self.device)
        return (drawn * columns**-0.5).to(self.dtype)

    def zeros(self, rows: int, columns: int) -> torch.Tensor:
        """Return [rows, columns] zeros."""
        return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """Return an RMSNorm's weights; zero places reduce the mean of squares by their share."""
        wide = torch.ones(self.big.hidden, device=self.device)
        wide[: len(weight)] = weight.float() * (self.small.hidden / self.big.hidden) ** 0.5
        return wide.to(self.dtype)

    def readers(self, weight: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a projection that reads the residual stream; all new entries are random."""
        wide = self.noise(rows, self.big.hidden)
        wide[: weight.shape[0], : weight.shape[1]] = weight.to(self.dtype)
        return wide

    def attention(self, small: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the four projections of a layer, from the small layer's."""
        big, d, D = self.big, self.small.head_dim, self.big.head_dim
        hidden = self.small.hidden
        query, key, value = (self.noise(n * D, big.hidden) for n in (big.heads, big.kv_heads, big.kv_heads))
        out = self.zeros(big.hidden, big.heads * D)
        scale = (D / d) ** 0.5  # scores are divided by the square root of the head's size
        group = self.small.heads // self.small.kv_heads
        for head, (to, kv) in enumerate(self._places):
            mine, theirs = slice(head * d, (head + 1) * d), slice(head // group * d, (head // group + 1) * d)
            new = torch.ones(D, dtype=torch.bool, device=self.device)
            new[self._rotary] = False
            query[to * D : (to + 1) * D][new] = 0
            query[to * D + self._rotary, :hidden] = (small["q"][mine].float() * scale).to(self.dtype)
            key[kv * D + self._rotary, :hidden] = small["k"][theirs].to(self.dtype)
            value[kv * D : kv * D + d, :hidden] = small["v"][theirs].to(self.dtype)
            out[:hidden, to * D : to * D + d] = small["o"][:, mine].to(self.dtype)
        return {"q": query, "k": key, "v": value, "o": out}

    def layer(self, small: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return one decoder layer's weights by name; without a small layer, one that adds nothing."""
        big = self.big
        width = big.heads * big.head_dim
        kv_width = big.kv_heads * big.head_dim
        if small is None:
            attention = {"q": self.noise(width, big.hidden), "o": self.zeros(big.hidden, width)}
            attention |= {name: self.noise(kv_width, big.hidden) for name in ("k", "v")}
            norms = [torch.ones(big.hidden, dtype=self.dtype, device=self.device) for _ in range(2)]
            gate, up = (self.noise(big.intermediate, big.hidden) for _ in range(2))
            down = self.zeros(big.hidden, big.intermediate)
        else:
            attention = self.attention({n: small[f"self_attn.{n}_proj.weight"] for n in "qkvo"})
            norms = [self.norm(small[f"{name}_layernorm.weight"]) for name in ("input", "post_attention")]
            gate, up = (self.readers(small[f"mlp.{name}_proj.weight"], big.intermediate) for name in ("gate", "up"))
            down = self.zeros(big.hidden, big.intermediate)
            theirs = small["mlp.down_proj.weight"]
            down[: theirs.shape[0], : theirs.shape[1]] = theirs.to(self.dtype)
        weights = {f"self_attn.{name}_proj.weight": weight for name, weight in attention.items()}
        weights |= self.mlp(gate, up, down)
        return weights | {"input_layernorm.weight": norms[0], "post_attention_layernorm.weight": norms[1]}

    def recurrent_layer(self) -> dict[str, torch.Tensor]:
        """Return the weights, by name, of a layer with a Mamba 2 state that adds nothing."""
        big = self.big
        width, heads = MAMBA_EXPAND * big.hidden, MAMBA_EXPAND * big.hidden // MAMBA_HEAD_DIM
        channels = width + 2 * MAMBA_STATE
        weights = {name: each for name, each in self.layer(None).items() if "self_attn" not in name}
        return weights | {
            "mamba.in_proj.weight": self.noise(width + channels + heads, big.hidden),
            "mamba.conv1d.weight": self.noise(channels, MAMBA_KERNEL)[:, None],
            "mamba.conv1d.bias": self.zeros(1, channels)[0],
            "mamba.A_log": torch.arange(1, heads + 1, device=self.device).log().to(self.dtype),
            "mamba.D": torch.ones(heads, dtype=self.dtype, device=self.device),
            "mamba.dt_bias": torch.ones(heads, dtype=self.dtype, device=self.device),
            "mamba.norm.weight": torch.ones(width, dtype=self.dtype, device=self.device),
            "mamba.out_proj.weight": self.zeros(big.hidden, width),
        }

    def mlp(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return an MLP's weights, or one copy per expert and a router of random directions."""
        if self._kind is None:
            return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}
        if isinstance(self._kind, Hybrid):
            return {"shared_mlp.input_linear.weight": torch.cat([gate, up]), "shared_mlp.output_linear.weight": down}
        num = self._kind.experts
        return {
            "mlp.gate.weight": self.noise(num, self.big.hidden),
            "mlp.experts.gate_up_proj": torch.cat([gate, up]).repeat(num, 1, 1),
            "mlp.experts.down_proj": down.repeat(num, 1, 1),
        }

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """Return an embedding that writes zeros to new places of the residual stream."""
        wide = self.zeros(len(weight), self.big.hidden)
        wide[:, : weight.shape[1]] = weight.to(self.dtype)
        return wide
