#!/usr/bin/env python3
"""Makes a big model from a small Llama-architecture model; both compute the same function.

    python experiments/inflate_model.py --shape 300m --out work/300m
    python experiments/inflate_model.py --from DIR --out DIR --hidden 2048 --layers 24 --intermediate 5632 --heads 16 \\
        --kv-heads 16 --head-dim 128 --dtype bfloat16

    python experiments/inflate_model.py --shape 300m --experts 8 --out work/300m_experts
    python experiments/inflate_model.py --shape 300m --attention-every 3 --out work/300m_hybrid

This measures real acceptance behavior at a real model's cost, without a download: the text is the small model's, the
cost the big one's. Every weight that a step reads exists and is dense; new weights are random and of full rank. Only
weights that would change the result are zero: rows and columns of output projections (attention's, the MLP's, the
embedding's) that lead from new units, or to new places of the residual stream, which stay zero throughout. RMSNorm's
weights and epsilon compensate for the changed mean. If heads grow, the new rows of the small model's own queries are
zero, too, which keeps its scores, and its rotary pairs move to the place of their frequency in the larger head. The
vocabulary does not change.

With --experts E the big model is a mixture of experts of Mixtral's architecture that computes the same function. Each
MLP exists E times, with separate storage. A random router sends each token to --experts-per-token of them, depending on
the token. The router's weights add up to 1, so the sum of equal experts is one expert's output, up to rounding.

With --attention-every K the big model is a hybrid of Granite 4's architecture. The last of every K layers has
attention. The others carry a Mamba 2 state from token to token, which is computed in full and adds nothing.

Weights are made and written one layer at a time, so a 34B model needs little memory. They are made on a GPU if there is
one, because a CPU takes minutes to draw the random numbers. Names of shapes: see SHAPES.
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
from inflation_shapes import SHAPES, Hybrid, InflateError, Kind, Mixture, Shape, check, shape_of, small_layer
from inflation_weights import MAMBA_EXPAND, MAMBA_HEAD_DIM, MAMBA_KERNEL, MAMBA_STATE, Inflation
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

DEMO_MODEL = Path(__file__).resolve().parents[1] / "lp_runtime" / "demo_model"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class SmallModel:
    """A checkpoint's weights, read to a device on demand."""

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


def big_config(small, shape: Shape, dtype: str, kind: Kind = None) -> dict:
    """Return the big model's config.json."""
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
    if isinstance(kind, Mixture):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
        config |= {"num_local_experts": kind.experts, "num_experts_per_tok": kind.per_token}
    if isinstance(kind, Hybrid):
        has_attention = [kind.has_attention(number) for number in range(shape.layers)]
        config |= {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"]}
        config |= {"num_local_experts": 0, "shared_intermediate_size": shape.intermediate}
        config |= {"position_embedding_type": "rope", "attention_multiplier": shape.head_dim**-0.5}
        config |= {"layer_types": ["attention" if each else "mamba" for each in has_attention]}
        config |= {"mamba_d_state": MAMBA_STATE, "mamba_d_conv": MAMBA_KERNEL, "mamba_expand": MAMBA_EXPAND}
        config |= {"mamba_d_head": MAMBA_HEAD_DIM, "mamba_n_heads": MAMBA_EXPAND * shape.hidden // MAMBA_HEAD_DIM}
    return config


def weights(
    small: SmallModel, shape: Shape, dtype: torch.dtype, kind: Kind = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the big model's weights, one layer at a time; the small model's layers come first, in order."""
    inflation = Inflation(shape_of(small.config), shape, dtype, small.device, kind=kind)
    head = "lm_head.weight" if "lm_head.weight" in small else "model.embed_tokens.weight"
    yield {"model.embed_tokens.weight": inflation.embedding(small["model.embed_tokens.weight"])}
    for number in range(shape.layers):
        index = small_layer(number, kind)
        if index is None:
            layer = inflation.recurrent_layer()
        else:
            layer = inflation.layer(small.layer(index) if index < small.config.num_hidden_layers else None)
        yield {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
    yield {
        "model.norm.weight": inflation.norm(small["model.norm.weight"]),
        "lm_head.weight": inflation.readers(small[head], small.config.vocab_size),
    }


def inflated(source: Path, shape: Shape, dtype: str, device: torch.device, kind: Kind = None) -> PreTrainedModel:
    """Return the big model, made on the device where it will run; nothing is written.

    Raises:
        InflateError: the small model does not fit.
    """
    small = SmallModel(source, device)
    settings = big_config(small.config, shape, dtype, kind)
    config = AutoConfig.for_model(settings["model_type"]).from_dict(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for part in weights(small, shape, getattr(torch, dtype), kind):
        model.load_state_dict(part, strict=False, assign=True)
    with device:  # not part of a checkpoint
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def choose_device() -> torch.device:
    """Return the device on which weights are made before they are written."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inflate(
    source: Path,
    out: Path,
    shape: Shape,
    dtype: str,
    device: torch.device | None = None,
    kind: Kind = None,
) -> int:
    """Write the big model, its config.json last; return its number of parameters.

    Raises:
        InflateError: the small model does not fit, or `out` already has a model.
    """
    if (out / "config.json").exists():
        raise InflateError(f"--out={out}: has a model in it; must be another folder")
    small = SmallModel(source, device or choose_device())
    check(shape_of(small.config), shape, kind)
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    num_parameters = num_bytes = 0
    for number, part in enumerate(weights(small, shape, getattr(torch, dtype), kind)):
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
    (out / "config.json").write_text(json.dumps(big_config(small.config, shape, dtype, kind), indent=1))
    return num_parameters


def kind_of(args: argparse.Namespace) -> Kind:
    """Return the kind of the big model that the command line asks for.

    Raises:
        InflateError: a number is out of range, or two kinds are asked for.
    """
    if args.experts is not None and args.attention_every is not None:
        raise InflateError(f"--attention-every={args.attention_every}: not with --experts")
    if args.attention_every is not None:
        return Hybrid(args.attention_every)
    return None if args.experts is None else Mixture(args.experts, args.experts_per_token)


def main(arguments: list[str] | None = None) -> None:
    """Inflate a model; `arguments` replaces the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, default=DEMO_MODEL, help="the small model's directory")
    parser.add_argument("--out", type=Path, required=True, help="directory for the big one")
    parser.add_argument("--shape", choices=SHAPES, default="300m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    for name in asdict(SHAPES["300m"]):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, help="instead of the shape's")
    parser.add_argument("--experts", type=int, default=None, help="make a mixture of that many experts of each MLP")
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument(
        "--attention-every", type=int, default=None, help="make a hybrid: the other layers have a Mamba 2 state"
    )
    args = parser.parse_args(arguments)
    given = {name: value for name in asdict(SHAPES["300m"]) if (value := getattr(args, name)) is not None}
    try:
        shape = Shape(**asdict(SHAPES[args.shape]) | given)
        num_parameters = inflate(args.source, args.out, shape, args.dtype, kind=kind_of(args))
    except (ValueError, OSError) as error:
        sys.exit(f"inflate_model: {str(error).splitlines()[0]}")
    print(f"{args.out}: {num_parameters / 1e6:.0f}M parameters, {args.dtype}")


if __name__ == "__main__":
    main()
