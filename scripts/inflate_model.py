#!/usr/bin/env python3
"""Make, from a small Llama-architecture model, a big one that computes the same function.

    python scripts/inflate_model.py --shape 300m --out work/300m
    python scripts/inflate_model.py --from DIR --out DIR --hidden 2048 --layers 24 --intermediate 5632 --heads 16 \\
        --kv-heads 16 --head-dim 128 --dtype bfloat16

    python scripts/inflate_model.py --shape 300m --experts 8 --out work/300m_experts

So that real acceptance behaviour can be measured at a real model's cost, with no download: the text is the small
model's, the price is the big one's. Every weight that is read in a step is there and is dense; what is new is random
and of full rank. Only what would reach the result is zero: rows and columns of output projections (attention's, the
MLP's, the embedding's) that lead from new units, or to new places of the residual stream, which stay zero throughout.
RMSNorm's weights and epsilon make up for the larger mean. Where heads grow, the new rows of the small model's own
queries are zero, too, so that its scores stay, and its rotary pairs move to where the larger head has their frequency.
The vocabulary stays.

With --experts E the big model is a mixture of experts of Mixtral's architecture that computes the same function: each
MLP is there E times, with storage of its own, and a random router sends each token to --experts-per-token of them, by
what the token is. The weights that it gives them add up to 1, so the sum of equal experts is one expert's output, but
for rounding.

Weights are made and written one layer at a time, so a 34B model needs little memory; on a GPU, where there is one, as
a CPU takes minutes to draw so many numbers. Names of shapes: see SHAPES.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from inflation_shapes import SHAPES, InflateError, Mixture, Shape, check, head_places, shape_of
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

DEMO_MODEL = Path(__file__).resolve().parents[1] / "lp_runtime" / "demo_model"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class Inflation:
    """The big model's weights, made one after the other.

    Args:
        small: the small model's shape.
        big: the big one's.
        dtype: of the big model.
        device: where they are made.
        seed: of what is random, which is not the same on every device.
        mixture: what each MLP becomes; None for one MLP.
    """

    def __init__(
        self,
        small: Shape,
        big: Shape,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        mixture: Mixture | None = None,
    ):
        check(small, big)
        self._mixture = mixture
        self.small, self.big, self.dtype, self.device = small, big, dtype, device
        self._random = torch.Generator(device).manual_seed(seed)
        self._places = head_places(small, big)
        # rotary pairs are (i, i + head_dim / 2): pair i of the small head has the frequency of pair i * growth
        growth, half = big.head_dim // small.head_dim, small.head_dim // 2
        pairs = torch.arange(half) * growth
        self._rotary = torch.cat([pairs, pairs + big.head_dim // 2]).to(device)

    def noise(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] of the size that keeps a unit input's output about a unit."""
        # Not float32 for a 34B model's layer: half the memory, and nobody reads these values.
        drawn = torch.randn(rows, columns, generator=self._random, device=self.device)
        return (drawn * columns**-0.5).to(self.dtype)

    def zeros(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns]"""
        return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """An RMSNorm's weights: the mean of squares is smaller by the share of places that are zero."""
        wide = torch.ones(self.big.hidden, device=self.device)
        wide[: len(weight)] = weight.float() * (self.small.hidden / self.big.hidden) ** 0.5
        return wide.to(self.dtype)

    def readers(self, weight: torch.Tensor, rows: int) -> torch.Tensor:
        """A projection that reads the residual stream: all new entries random."""
        wide = self.noise(rows, self.big.hidden)
        wide[: weight.shape[0], : weight.shape[1]] = weight.to(self.dtype)
        return wide

    def attention(self, small: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The four projections of a layer, from the small layer's."""
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
        """One decoder layer's weights, by their names in it; a new one, which adds nothing, if there is no small."""
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

    def mlp(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
        """An MLP's weights, or as many copies of them as there are experts, and a router of random directions."""
        if self._mixture is None:
            return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}
        num = self._mixture.experts
        return {
            "mlp.gate.weight": self.noise(num, self.big.hidden),
            "mlp.experts.gate_up_proj": torch.cat([gate, up]).repeat(num, 1, 1),
            "mlp.experts.down_proj": down.repeat(num, 1, 1),
        }

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """The embedding writes to the residual stream: zeros in its new places."""
        wide = self.zeros(len(weight), self.big.hidden)
        wide[:, : weight.shape[1]] = weight.to(self.dtype)
        return wide


class SmallModel:
    """A checkpoint's weights, read when asked for, to a device."""

    def __init__(self, folder: Path, device: torch.device):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InflateError(f"--from={folder}: no safetensors file there")
        self.config = AutoConfig.from_pretrained(folder)
        if self.config.model_type != "llama" or self.config.attention_bias or self.config.mlp_bias:
            raise InflateError(f"--from={folder}: must be a Llama-architecture model without biases")
        self.device = device
        self._files = [safe_open(file, "pt") for file in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name).to(self.device)

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{number}."
        return {name.removeprefix(prefix): self[name] for name in self._where if name.startswith(prefix)}


def big_config(small, shape: Shape, dtype: str, mixture: Mixture | None = None) -> dict:
    """The big model's config.json."""
    config = small.to_dict() | {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": small.rms_norm_eps * small.hidden_size / shape.hidden,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if mixture is not None:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
        config |= {"num_local_experts": mixture.experts, "num_experts_per_tok": mixture.per_token}
    return config


def weights(
    small: SmallModel, shape: Shape, dtype: torch.dtype, mixture: Mixture | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """The big model's weights, a layer at a time; the small model's layers are the first, in order."""
    inflation = Inflation(shape_of(small.config), shape, dtype, small.device, mixture=mixture)
    head = "lm_head.weight" if "lm_head.weight" in small else "model.embed_tokens.weight"
    yield {"model.embed_tokens.weight": inflation.embedding(small["model.embed_tokens.weight"])}
    for number in range(shape.layers):
        theirs = small.layer(number) if number < small.config.num_hidden_layers else None
        yield {f"model.layers.{number}.{name}": weight for name, weight in inflation.layer(theirs).items()}
    yield {
        "model.norm.weight": inflation.norm(small["model.norm.weight"]),
        "lm_head.weight": inflation.readers(small[head], small.config.vocab_size),
    }


def inflated(
    source: Path, shape: Shape, dtype: str, device: torch.device, mixture: Mixture | None = None
) -> PreTrainedModel:
    """The big model, made where it is to run; nothing is written.

    Raises:
        InflateError: if the small model is not one that fits.
    """
    small = SmallModel(source, device)
    kind = LlamaConfig if mixture is None else MixtralConfig
    config = kind.from_dict(big_config(small.config, shape, dtype, mixture))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for part in weights(small, shape, getattr(torch, dtype), mixture):
        model.load_state_dict(part, strict=False, assign=True)
    with device:  # no checkpoint has these
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def choose_device() -> torch.device:
    """Where the weights are made, if they are written."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inflate(
    source: Path,
    out: Path,
    shape: Shape,
    dtype: str,
    device: torch.device | None = None,
    mixture: Mixture | None = None,
) -> int:
    """Write the big model, its config.json last. Returns how many parameters it has.

    Raises:
        InflateError: if the small model is not one that fits, or there is a whole model in `out`.
    """
    if (out / "config.json").exists():
        raise InflateError(f"--out={out}: has a model in it; must be another folder")
    small = SmallModel(source, device or choose_device())
    check(shape_of(small.config), shape)
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    num_parameters = num_bytes = 0
    for number, part in enumerate(weights(small, shape, getattr(torch, dtype), mixture)):
        name = f"model-{number:05d}.safetensors"
        on_host = {key: weight.contiguous().cpu() for key, weight in part.items()}
        save_file(on_host, out / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
        num_parameters += sum(weight.numel() for weight in part.values())
        num_bytes += sum(weight.numel() * weight.element_size() for weight in part.values())
    table = {"metadata": {"total_size": num_bytes}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(table, indent=1))
    for name in COPIED:
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    (out / "config.json").write_text(json.dumps(big_config(small.config, shape, dtype, mixture), indent=1))
    return num_parameters


def main(arguments: list[str] | None = None) -> None:
    """Inflate a model as the command line says.

    Args:
        arguments: in place of the command line's.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, default=DEMO_MODEL, help="the small model's directory")
    parser.add_argument("--out", type=Path, required=True, help="where to write the big one")
    parser.add_argument("--shape", choices=SHAPES, default="300m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    for name in asdict(SHAPES["300m"]):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, help="instead of the shape's")
    parser.add_argument("--experts", type=int, default=None, help="make a mixture of so many experts of each MLP")
    parser.add_argument("--experts-per-token", type=int, default=2)
    args = parser.parse_args(arguments)
    given = {name: value for name in asdict(SHAPES["300m"]) if (value := getattr(args, name)) is not None}
    try:
        shape = Shape(**asdict(SHAPES[args.shape]) | given)
        mixture = None if args.experts is None else Mixture(args.experts, args.experts_per_token)
        num_parameters = inflate(args.source, args.out, shape, args.dtype, mixture=mixture)
    except (ValueError, OSError) as error:
        sys.exit(f"inflate_model: {str(error).splitlines()[0]}")
    print(f"{args.out}: {num_parameters / 1e6:.0f}M parameters, {args.dtype}")


if __name__ == "__main__":
    main()
