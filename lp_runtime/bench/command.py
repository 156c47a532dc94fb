"""lp-bench: decodes every prompt with every method, in rotating order, and writes a report."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence

import torch
from tqdm import tqdm

from lp_runtime.bench.methods import Decode, Result, critical_path_methods, huggingface_methods, runtime_methods
from lp_runtime.bench.output import check_folder, report
from lp_runtime.bench.prompts import encode_prompts, read_sources
from lp_runtime.bench.report import BenchReport
from lp_runtime.config.commands import METHODS, BenchConfig
from lp_runtime.errors import ConfigError, ReplicaError, first_line, unforeseen_as
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.tokenizer import check_chat_template
from lp_runtime.runtime import LookaheadRuntime

log = logging.getLogger(__name__)

PARTIAL_METHODS = ("hf_compiled", "hf_prompt_lookup", "paper")  # those that some models or machines cannot run


def check_bench(config: BenchConfig) -> None:
    """Check the settings before a model is loaded; create the output folder, and set torch's threads."""
    read_sources(config)
    if config.chat:
        check_chat_template(load_tokenizer(config.model), config.model.location)
    if config.threads is not None:
        if config.num_gpus > 1:
            raise ConfigError(f"threads={config.threads}: only with gpus=1; replicas of one machine share its cores")
        torch.set_num_threads(config.threads)  # before steps are timed
    _check_degrees(config, config.replica_gpus)
    check_folder(config.output)


def _check_degrees(config: BenchConfig, gpus_per_replica: int) -> None:
    """Raise ConfigError if `degrees` is given for a model that spans several GPUs."""
    if config.degrees and gpus_per_replica > 1:
        raise ConfigError(
            f"degrees={list(config.degrees)}: only with gpus_per_replica=1, because one process runs all shares"
        )


def bench(runtime: LookaheadRuntime, config: BenchConfig) -> None:
    """Run the comparison, print its table, and write the report if an output folder is given."""
    _check_degrees(config, runtime.gpus_per_replica)
    prompts = encode_prompts(runtime, config)
    is_cuda = runtime.info.device.startswith("cuda")
    names = config.methods or [name for name in METHODS if is_cuda or name != "hf_compiled"]
    with unforeseen_as(ReplicaError, "the comparison failed"):
        results = _run(config, runtime, names, [prompt.token_ids for prompt in prompts])
    compared = BenchReport(config, runtime, [prompt.task for prompt in prompts], results)
    report(compared.markdown(), config.output, compared.files() if config.output is not None else {})


def _warm_up(methods: dict[str, Decode], prompts: list[list[int]], may_fail: Sequence[str]) -> None:
    """Run every method once, as its first request compiles and measures; remove those of `may_fail` that fail."""
    for name, decode in list(methods.items()):
        try:
            for prompt in prompts if name == "hf_compiled" else prompts[:1]:  # it compiles for each prompt length
                decode(prompt)
        except Exception as error:  # of torch.compile, of transformers, of the runtime
            if name not in may_fail or len(methods) == 1:
                raise
            log.warning("%s cannot run here, so it is left out: %s", name, first_line(error))
            del methods[name]


def _run(
    config: BenchConfig, runtime: LookaheadRuntime, names: list[str], prompts: list[list[int]]
) -> dict[str, list[Result]]:
    """Decode every prompt with every method in every round; return the results by method, in order."""
    eos = runtime.info.eos_token_ids if config.stops_at_eos else frozenset()
    methods: dict[str, Decode] = huggingface_methods(config, names, eos)
    methods |= runtime_methods(config, runtime, names)
    methods |= critical_path_methods(config, config.degrees, eos)
    _warm_up(methods, prompts, PARTIAL_METHODS[:1] if config.methods else PARTIAL_METHODS)
    results: dict[str, list[Result]] = {name: [] for name in methods}
    order = list(methods)
    total = config.rounds * len(prompts) * len(order)
    is_watched = sys.stderr.isatty()
    with contextlib.closing(tqdm(total=total, unit="run", disable=not is_watched, leave=False)) as bar:
        for _ in range(config.rounds):
            for number, prompt in enumerate(prompts):
                order.append(order.pop(0))
                for name in order:
                    result = methods[name](prompt)
                    results[name].append(result)
                    bar.update()
                    if not is_watched:  # so that an interrupted run leaves its results in the log
                        seconds, num_tokens = min(result.seconds.values()), len(result.token_ids)
                        rate, ratio = num_tokens / seconds, num_tokens / result.num_steps
                        shown = f"{rate:.1f} tokens/s, S {ratio:.2f}, {seconds:.2f} s"
                        with contextlib.suppress(OSError):  # stderr may have been closed by its reader
                            print(f"prompt {number}, {name}: {shown}", file=sys.stderr, flush=True)
    return results
