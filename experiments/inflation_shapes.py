"""Shapes of models that experiments/inflate_model.py makes, and checks that the small model fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-architecture model that its cost depends on."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "300m": Shape(1024, 22, 3072, 16, 8, 64),
    "1b": Shape(2048, 22, 5632, 32, 4, 64),
    "7b": Shape(4096, 32, 11008, 32, 32, 128),  # Llama 2 and CodeLlama, the paper's models
    "13b": Shape(5120, 40, 13824, 40, 40, 128),
    "34b": Shape(8192, 48, 22016, 64, 8, 128),
}


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts that replaces each MLP.

    Attributes:
        experts: experts of a layer.
        per_token: experts that each token is sent to.
    """

    experts: int
    per_token: int = 2

    def __post_init__(self) -> None:
        if self.experts < 2:
            raise InflateError(f"--experts={self.experts}: must be at least 2")
        if not 1 <= self.per_token <= self.experts:
            raise InflateError(f"--experts-per-token={self.per_token}: must be 1 to --experts={self.experts}")


@dataclass(frozen=True)
class Hybrid:
    """Layers with attention; the others carry a recurrent state (Mamba 2).

    Attributes:
        attention_every: n; the last of every n layers has attention, and is one of the small model's.
    """

    attention_every: int

    def __post_init__(self) -> None:
        if self.attention_every < 2:
            raise InflateError(f"--attention-every={self.attention_every}: must be at least 2")

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        return layer % self.attention_every == self.attention_every - 1


Kind = Mixture | Hybrid | None  # kind of the big model; None for a Llama


def small_layer(number: int, kind: Kind) -> int | None:
    """Return the number of the small model's layer that a layer computes; None for a recurrent layer.

    The small model may have fewer layers.
    """
    if not isinstance(kind, Hybrid):
        return number
    return number // kind.attention_every if kind.has_attention(number) else None


class InflateError(ValueError):
    """Raised if a setting is invalid or the small model does not fit into a shape."""


def shape_of(config) -> Shape:
    return Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )


def check(small: Shape, big: Shape, kind: Kind = None) -> None:
    """Check that a shape is valid and holds the small model.

    Raises:
        InflateError: `small` does not fit into `big`.
    """
    if isinstance(kind, Hybrid) and big.layers < small.layers * kind.attention_every:
        least = small.layers * kind.attention_every
        raise InflateError(
            f"--layers={big.layers}: must be at least {least} with --attention-every={kind.attention_every}"
        )
    for name, value in asdict(big).items():
        if value < 1:
            raise InflateError(f"--{name.replace('_', '-')}={value}: must be at least 1")
    for name, least in asdict(small).items():
        if asdict(big)[name] < least and name not in ("heads", "kv_heads"):
            raise InflateError(f"--{name.replace('_', '-')}={asdict(big)[name]}: must be at least {least}")
    if big.heads % big.kv_heads:
        raise InflateError(f"--heads={big.heads}: must be a multiple of --kv-heads={big.kv_heads}")
    if big.hidden % big.heads:  # required by transformers
        raise InflateError(f"--hidden={big.hidden}: must be a multiple of --heads={big.heads}")
    if big.head_dim % small.head_dim:
        raise InflateError(f"--head-dim={big.head_dim}: must be a multiple of {small.head_dim}")
    if len(places := head_places(small, big)) < small.heads or max(kv for _, kv in places) >= big.kv_heads:
        raise InflateError(f"--kv-heads={big.kv_heads}: too few for the small model's {small.heads} heads")


def head_places(small: Shape, big: Shape) -> list[tuple[int, int]]:
    """Return (big model's head, its key/value head) for each head of the small model."""
    group, big_group = small.heads // small.kv_heads, big.heads // big.kv_heads
    kv_heads_each = -(-group // big_group)  # smaller groups need copies of keys and values
    places = []
    for head in range(small.heads):
        which, within = divmod(head, group)
        kv = which * kv_heads_each + within // big_group
        places.append((kv * big_group + within % big_group, kv))
    return places
