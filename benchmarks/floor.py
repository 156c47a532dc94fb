"""How far a step is from the floor: the time that it takes to read the model's weights once.

    python benchmarks/floor.py --models DIR ... --tokens 1 64 128 --compile off auto full --dtype bfloat16
    python benchmarks/floor.py --shapes 7b 13b 34b --dtype bfloat16   the demo model inflated, in memory

The floor is weight bytes / copy bandwidth, the bandwidth being what a large copy on the device reaches, bytes read and
written. A step is what decoding does: inputs to the device, forward pass, successors and runners-up back on the host.
Medians of --rounds, which alternate between the sizes. `issued` is when the host has given the device everything to do:
what the host takes is hidden behind the device as long as that is less than the step. Weights that packing keeps
outside of parameters are counted by their shapes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from common import machine, markdown

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.engine.replica import choose_device, made_ready
from lp_runtime.lookahead.drafters.best_first.tables import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.loader import load_model
from lp_runtime.model.optimize.packing import PackedLinear
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from inflate_model import DEMO_MODEL, SHAPES, inflated  # noqa: E402


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy: the best of several."""
    size = (4 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = max(best, 2 * size / (time.perf_counter() - started))
    return best


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes that a step of one token reads: all weights but an embedding that is looked up only, and tied ones once."""
    seen = {id(each): each.numel() * each.element_size() for each in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not getattr(head, "weight", None):
        seen.pop(id(embedding.weight), None)
    packed = [each for each in model.modules() if isinstance(each, PackedLinear)]
    return sum(seen.values()) + sum(each.weight.shape.numel() * each.weight.dtype.itemsize for each in packed)


def measure(model: ModelRunner, tokens: list[int], context: int, rounds: int) -> dict[int, tuple[float, float]]:
    """(step, issued) milliseconds by the step's number of tokens, over `context` committed ones."""
    drawing = Sampler(TreeProcessors([], model.device), None, num_top_k=K)
    text = [i % model.vocabulary_size for i in range(context)]
    model.begin(context + rounds * len(tokens) + 8 * len(tokens) + max(tokens))
    model.prefill(text)

    def step(size: int) -> tuple[float, float]:
        places = np.arange(size)
        parents = np.where(places % 8 == 1, 0, places - 1)
        depths = np.where(places > 0, (places - 1) % 8 + 1, 0)
        tree = TokenTree.from_arrays(places % model.vocabulary_size, parents, depths, places, 0, max_depth=8)
        nodes = list(range(size))
        synchronize(model.device)
        started = time.perf_counter()
        logits = model.forward(tree, nodes, nodes)
        packed, _ = drawing.draw(logits, tree, nodes, text, drawn=model.text.drawn)
        issued = time.perf_counter()
        packed.cpu()
        ended = time.perf_counter()
        return 1e3 * (ended - started), 1e3 * (issued - started)

    times: dict[int, list[tuple[float, float]]] = {size: [] for size in tokens}
    for number in range(rounds + 4):
        for size in tokens:
            taken = step(size)
            if number >= 4:
                times[size].append(taken)
    return {
        size: (statistics.median(a for a, _ in seen), statistics.median(b for _, b in seen))
        for size, seen in times.items()
    }


def rows_of(
    args: argparse.Namespace,
    shape: str | None,
    path: str | None,
    compile_: str,
    device: torch.device,
    bandwidth: float,
) -> list[list]:
    """Of one model, by its shape or its directory, and one way to launch; bandwidth in bytes a second."""
    config = RuntimeConfig(model=ModelConfig(path=path), dtype=args.dtype, compile=compile_)
    if shape is None:
        loaded = load_model(config.model, device, config.dtype)
    else:
        loaded = inflated(DEMO_MODEL, SHAPES[shape], "float32" if args.dtype == "auto" else args.dtype, device)
    model, _ = made_ready(loaded, config, device)
    size = weight_bytes(model.model)
    floor = 1e3 * size / bandwidth
    found = measure(model, args.tokens, args.context, args.rounds)
    rows = []
    for tokens, (step, issued) in found.items():
        name = compile_ if model.fixed_sizes else "off"
        ratios = (step / floor, step / found[args.tokens[0]][0])
        numbers = (size / 1e9, floor, step, *ratios, issued)
        rows.append([shape or path or "demo", name, tokens, *(f"{each:.2f}" for each in numbers)])
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], help="directories; the demo model if nothing is given")
    parser.add_argument("--shapes", nargs="+", default=[], choices=SHAPES, help="of inflated models")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64, 128])
    parser.add_argument("--compile", nargs="+", default=["auto"], choices=["off", "auto", "full"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=512, help="committed tokens")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    device = choose_device("auto", 0)
    bandwidth = copy_bandwidth(device)
    print(f"{machine()}; copy bandwidth {bandwidth / 1e9:.0f} GB/s; {args.context} committed tokens\n", flush=True)
    rows, failed = [], []
    wanted = [(shape, None) for shape in args.shapes] + [(None, path) for path in args.models]
    for shape, path in wanted or [(None, None)]:
        for compile_ in args.compile:
            try:
                rows += rows_of(args, shape, path, compile_, device, bandwidth)
            except Exception:  # of a compiler, or for want of memory: the others are still worth having
                traceback.print_exc()
                failed.append(f"{shape or path or 'demo'} {compile_}")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    header = ["model", "compile", "tokens", "GB", "floor ms", "step ms", "over floor", "over the first", "issued ms"]
    print("\n" + markdown(header, rows))
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
