"""Measures memory and disk reads of loading a sliced model, and times sums and sampling of shards.

    python benchmarks/micro.py shards --model DIR --shards 1 2

The study starts new processes for each number of shards P. It measures the largest shard's weights; the peak growth of
its own memory while it loads and reads every weight; the same with mapped pages of the checkpoint, which belong to the
page cache and are evicted when memory is short; and its reads from the disk. Before, the checkpoint is dropped from the
page cache, if the system does that. Then it times a sum of [tokens, hidden size] float32 between P processes, over
shared memory and over gloo; and sampling of the successors of --tokens tokens with K top-k candidates, greedily and
with noise, from logits that are put together and from slices of the vocabulary. Medians of alternating turns.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil
import torch
from common import Results, add_model_argument

from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.process_group import new_segment_name
from lp_runtime.distributed.reducers import CollectiveReducer
from lp_runtime.distributed.shards import ShardLink, ShardPlace, shard_group
from lp_runtime.kernels.types import Packing
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.tensor_parallel.layers import GatheredLinear
from lp_runtime.model.tensor_parallel.slicing import slice_model
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.sampling.slices import SampleRequest, VocabularySlice
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sampling.truncation import Truncation

CPU = torch.device("cpu")
TIMEOUT_SECONDS = 300.0
SAMPLE_SECONDS = 0.002
NUM_SUMS, NUM_TURNS = 50, 6
PACKING = Packing(K, 1 + K // 2)
COLUMNS = ("weights, MiB", "own memory grew by, MiB", "with mapped pages, MiB", "read, MiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_model_argument(parser)
    parser.add_argument("--shards", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 32, 128])


def run(args: argparse.Namespace) -> int:
    """Load and sum with each number of shards."""
    config = ModelConfig(path=args.model)
    results = Results("shards", args.output, dict.fromkeys(COLUMNS, ".0f"))
    for num_shards in args.shards:
        empty_page_cache(Path(config.location))
        measured = in_processes(num_shards, config, args.dtype, args.tokens)
        row = {"shards": num_shards}
        for name in measured[0]:
            row[name] = max(each[name] for each in measured)
        results.add(row)
    results.finish(f"{config.location}, {args.dtype}; sums and samples in us")
    return 0


def empty_page_cache(folder: Path) -> None:
    """Drop a checkpoint from the page cache, so that its next reader reads it from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_processes(num_shards: int, *arguments: object) -> list[dict[str, float]]:
    """Return the results of `_measure` on each shard."""
    context = multiprocessing.get_context("spawn")
    segment, results = new_segment_name(), context.Queue()
    places = [ShardPlace(shard, num_shards, segment, TIMEOUT_SECONDS) for shard in range(num_shards)]
    processes = [context.Process(target=_measure, args=(each, results, *arguments), daemon=True) for each in places]
    for process in processes:
        process.start()
    measured = [results.get(timeout=TIMEOUT_SECONDS) for _ in processes]
    for process in processes:
        process.join()
    return measured


def _measure(place: ShardPlace, results, config: ModelConfig, dtype: str, tokens: list[int]) -> None:
    torch.set_num_threads(1)
    importlib.import_module("transformers.distributed.tensor_parallel")  # before measuring: imports take memory, too
    process = psutil.Process()

    def resident() -> tuple[int, int]:
        """Return the process's bytes without and with mapped files' pages."""
        memory = process.memory_info()
        return memory.rss - memory.shared, memory.rss

    before, read = resident(), process.io_counters().read_bytes
    peaks, is_done = [before], threading.Event()

    def sample() -> None:
        while not is_done.wait(SAMPLE_SECONDS):
            peaks.append(resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    model = load_model(config, CPU, dtype, place, TIMEOUT_SECONDS)
    link = None if place.is_whole else ShardLink(place, CPU, TIMEOUT_SECONDS)
    if link is not None:
        slice_model(model, link)
    for weight in model.parameters():
        weight.sum()  # a mapped file is only read where it is accessed
    is_done.set()
    sampler.join()
    weights = {each.data_ptr(): each.numel() * each.element_size() for each in model.parameters()}
    own, whole = (max(each) - start for each, start in zip(zip(*peaks, strict=True), before, strict=True))
    numbers = (sum(weights.values()), own, whole, process.io_counters().read_bytes - read)
    row = dict(zip(COLUMNS, (number / 2**20 for number in numbers), strict=True))
    if link is not None:
        row |= sums(link, model.config.get_text_config().hidden_size, tokens)
        row |= samples(place, model.get_output_embeddings(), tokens)
        link.smallest(0)  # no shard leaves before all have finished
        link.close()
    results.put(row)


def sums(link: ShardLink, size: int, tokens: list[int]) -> dict[str, float]:
    """Return the median time of a sum by tokens and transport, in microseconds."""
    place = link.place
    reducers = {
        "shared": link.reducer,
        "gloo": CollectiveReducer(shard_group(place, "gloo", TIMEOUT_SECONDS), place.num_shards),
    }
    tasks: dict[str, Callable[[], object]] = {}
    for num_tokens in tokens:
        for name, reducer in reducers.items():
            states = torch.ones(num_tokens, size)
            tasks[f"{name}, {num_tokens} tokens"] = partial(reducer.all_reduce, states)
    return in_turns(tasks)


def samples(place: ShardPlace, head: GatheredLinear, tokens: list[int]) -> dict[str, float]:
    """Return the median time of sampling by tokens, noise and method, in microseconds."""
    vocabulary, size = VocabularySlice(place.shard, head.sizes, CPU), head.sizes[place.shard]
    tasks: dict[str, Callable[[], object]] = {}
    for num_tokens in tokens:
        part = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(place.shard))
        nodes = list(range(num_tokens))
        tree = TokenTree([0], max_depth=num_tokens)
        tree.add_branch(nodes[1:])
        for what, noise in (("greedy", None), ("noise", GumbelNoise(1, 0, head.out_features, CPU))):
            sampler = Sampler(TreeProcessors([], CPU), noise, num_top_k=K)
            tasks[f"{what}, put together, {num_tokens} tokens"] = partial(
                sample_together, place, head, part, sampler, tree, nodes
            )
            key = None if noise is None else (1, 0)
            draw = SampleRequest(PACKING, Truncation(), key, [1 + node for node in nodes])
            tasks[f"{what}, in slices, {num_tokens} tokens"] = partial(
                sample_slices, place, head, vocabulary, part, draw
            )
    return in_turns(tasks)


def sample_together(
    place: ShardPlace, head: GatheredLinear, part: torch.Tensor, sampler: Sampler, tree: TokenTree, nodes: list[int]
) -> None:
    """Gather whole logits on every shard, and sample from them on the first."""
    logits = head.put_together(part)
    if place.is_leader:
        sampler.sample(StepLogits(logits), tree, nodes, [0])


def sample_slices(
    place: ShardPlace, head: GatheredLinear, vocabulary: VocabularySlice, part: torch.Tensor, draw: SampleRequest
) -> None:
    """Find candidates of the sampler in each slice, and merge them on the first shard."""
    candidates = head.gather(vocabulary.find(part, draw))
    if place.is_leader:
        vocabulary.pack(candidates, draw)


def in_turns(tasks: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each task in microseconds; all shards run the same ones."""
    times: dict[str, list[float]] = {}
    for _ in range(NUM_TURNS):
        for name, task in tasks.items():
            task()
            started = time.perf_counter()
            for _ in range(NUM_SUMS):
                task()
            times.setdefault(name, []).append(1e6 * (time.perf_counter() - started) / NUM_SUMS)
    return {name: statistics.median(each) for name, each in times.items()}
