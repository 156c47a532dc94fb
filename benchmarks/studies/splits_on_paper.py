"""Estimates the step time of each split of a machine's GPUs on paper: needs no GPU, loads nothing.

    python benchmarks/speed.py splits_on_paper --gpus 8 --hbm 3350 --link 450 --compression 1:2.4 2:2.7 4:3.0
    python benchmarks/speed.py splits_on_paper --gpus 8 --hbm 3350 --link 50 --compression 1:2.4 2:2.7 4:3.0    # PCIe

R x P means R replicas of P GPUs. Without --model the model is Llama 3 70B in bfloat16. Weights, keys and values have
the bytes that gpus_per_replica=auto counts. A step reads all weights on a GPU except for the embedding, and the keys
and values of the context. It sums two outputs per layer and the embeddings of T tokens among P GPUs; each sends
2 (P - 1) / P of their bytes. It gathers T rows of logits. Every collective takes --collective-us in addition, and so
does the exchange of R replicas. Computation (as if memory were the limit) and the host are left out. S is given, by R.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any, NamedTuple, cast

import torch
from common import Results, Row
from transformers import LlamaConfig, PreTrainedConfig

from lp_runtime.config.settings import ModelConfig
from lp_runtime.model.capacity import NCCL_BYTES
from lp_runtime.model.loading.sizes import ModelSize, size_of_model

GB, GIB = 10**9, 1 << 30
LLAMA_3_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


class Machine(NamedTuple):
    """Machine that computes a step.

    Attributes:
        hbm: bytes per second that a GPU reads from its memory.
        link: bytes per second that a GPU sends to the others.
        collective: additional seconds of a collective.
        memory: free bytes on a GPU.
    """

    hbm: float
    link: float
    collective: float
    memory: float


class Cost(NamedTuple):
    """Cost of a step.

    Attributes:
        held: bytes of weights on a GPU.
        read: bytes that a GPU reads from its memory.
        sent: bytes that a GPU sends.
        collectives: number of collectives.
        seconds: duration of the step.
        fits: whether the replica fits into its GPUs' memory.
    """

    held: int
    read: int
    sent: int
    collectives: int
    seconds: float
    fits: bool


def cost_of_step(size: ModelSize, replicas: int, shards: int, tokens: int, context: int, machine: Machine) -> Cost:
    """Return the cost of a step on R x P GPUs.

    Args:
        size: size of the model.
        replicas: R.
        shards: P.
        tokens: T, that a replica feeds in a step.
        context: tokens whose keys and values are read.
        machine: the machine.
    """
    text: PreTrainedConfig = size.config.get_text_config()
    dtype = text.dtype
    assert isinstance(dtype, torch.dtype)  # size_of_model has read it
    itemsize = dtype.itemsize
    held = size.weight_bytes(shards)
    embedding = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size * itemsize // shards
    read = held - embedding + context * size.cache_bytes_per_token(shards)
    num_sums = 2 * text.num_hidden_layers + 1 if shards > 1 else 0
    summed = 2 * num_sums * tokens * text.hidden_size * itemsize
    gathered = tokens * text.vocab_size * itemsize if shards > 1 else 0
    sent = (summed + gathered) * (shards - 1) // shards
    collectives = num_sums + (shards > 1) + (replicas > 1)
    seconds = read / machine.hbm + sent / machine.link + collectives * machine.collective
    needed = size.needed_bytes(shards, NCCL_BYTES if replicas * shards > 1 else 0)
    return Cost(held, read, sent, collectives, seconds, needed <= machine.memory)


def _by_replicas(text: str) -> tuple[int, float]:
    replicas, _, compression = text.partition(":")
    return int(replicas), float(compression)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--model", help="directory or hub id; Llama 3 70B's shape if not given")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--hbm", type=float, default=3350.0, help="GB/s that a GPU reads; an H100's by default")
    parser.add_argument("--link", type=float, default=450.0, help="GB/s that a GPU sends; NVLink's by default")
    parser.add_argument("--collective-us", type=float, default=10.0, help="additional microseconds of a collective")
    parser.add_argument("--memory", type=float, default=79.0, help="free GiB on a GPU")
    parser.add_argument("--tokens", type=int, default=32, help="T, tokens that a replica feeds in a step")
    parser.add_argument("--context", type=int, default=2048, help="tokens whose keys and values a step reads")
    parser.add_argument(
        "--compression", type=_by_replicas, nargs="+", required=True, metavar="R:S", help="S by number of replicas"
    )


def run(args: argparse.Namespace) -> int:
    """Compute every split."""
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            LlamaConfig(**cast(dict[str, Any], LLAMA_3_70B)).save_pretrained(folder)
        size = size_of_model(ModelConfig(path=args.model or folder), "auto", args.context)
    if size is None:
        raise SystemExit(f"--model {args.model}: its size cannot be told")
    machine = Machine(args.hbm * GB, args.link * GB, args.collective_us / 1e6, args.memory * GIB)
    compression = dict(args.compression)
    results = Results("splits_on_paper", args.output, {"ms": ".2f", "tokens/s": ".1f"})
    for shards in (each for each in range(args.gpus, 0, -1) if args.gpus % each == 0):
        replicas = args.gpus // shards
        cost = cost_of_step(size, replicas, shards, args.tokens, args.context, machine)
        row: Row = {"R x P": f"{replicas} x {shards}", "GiB held": cost.held / GIB, "GB read": cost.read / GB}
        row |= {"MB sent": cost.sent / 1e6, "collectives": cost.collectives}
        if not cost.fits:
            results.add(row | {"tokens/s": "does not fit"})
            continue
        known = compression.get(replicas)
        speed = "S not given" if known is None else known / cost.seconds
        results.add(row | {"ms": 1000 * cost.seconds, "S": known or "", "tokens/s": speed})
    results.finish(
        f"on paper: {args.gpus} GPUs, HBM {args.hbm:g} GB/s, link {args.link:g} GB/s, {args.collective_us:g} us a"
        f" collective, T {args.tokens}, context {args.context}"
    )
    return 0
