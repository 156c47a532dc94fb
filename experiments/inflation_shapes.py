"""Shapes of models that experiments/inflate_model.py makes, and which of them hold the small one."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Shape:
    """What a Llama-architecture model's cost depends on."""

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
    """How many experts each MLP becomes.

    Attributes:
        experts: of a layer.
        per_token: that each token is sent to.
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
    """Which layers have attention; the others carry a recurrent state (Mamba 2).

    Attributes:
        attention_every: the last of so many layers has attention, and is one of the small model's.
    """

    attention_every: int

    def __post_init__(self) -> None:
        if self.attention_every < 2:
            raise InflateError(f"--attention-every={self.attention_every}: must be at least 2")

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return layer % self.attention_every == self.attention_every - 1


Kind = Mixture | Hybrid | None  # of the big model; None for a Llama


def small_layer(number: int, kind: Kind) -> int | None:
    """Return the small model's layer that a big model's layer computes, which it may not have; None for a recurrent
    one."""
    if not isinstance(kind, Hybrid):
        return number
    return number // kind.attention_every if kind.has_attention(number) else None


class InflateError(ValueError):
    """A shape that the small model does not fit into."""


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
    """
    Raises:
        InflateError: if `small` does not fit into `big`.
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
    if big.hidden % big.heads:  # transformers insists
        raise InflateError(f"--hidden={big.hidden}: must be a multiple of --heads={big.heads}")
    if big.head_dim % small.head_dim:
        raise InflateError(f"--head-dim={big.head_dim}: must be a multiple of {small.head_dim}")
    if len(places := head_places(small, big)) < small.heads or max(kv for _, kv in places) >= big.kv_heads:
        raise InflateError(f"--kv-heads={big.kv_heads}: too few for the small model's {small.heads} heads")


def head_places(small: Shape, big: Shape) -> list[tuple[int, int]]:
    """For each head of the small model: the big model's head that takes it, and the key/value head that one reads."""
    group, big_group = small.heads // small.kv_heads, big.heads // big.kv_heads
    kv_heads_each = -(-group // big_group)  # where groups are smaller, keys and values are there several times
    places = []
    for head in range(small.heads):
        which, within = divmod(head, group)
        kv = which * kv_heads_each + within // big_group
        places.append((kv * big_group + within % big_group, kv))
    return places
