"""lp-bench: every prompt by every method, in an order that turns from prompt to prompt; a table, JSON and a plot."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from lp_runtime.api import LookaheadRuntime
from lp_runtime.batch import read_prompts
from lp_runtime.bench.methods import (
    Decode,
    Result,
    critical_path_methods,
    huggingface_methods,
    runtime_methods,
)
from lp_runtime.bench.report import Report
from lp_runtime.command_config import METHODS, BenchConfig, GenerateConfig
from lp_runtime.errors import ConfigError

OWN_PROMPTS = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
)


def read_sources(config: BenchConfig) -> list[str | list[int]]:
    """The prompts: of the files that are given, else a few of its own.

    Raises:
        ConfigError: if a file cannot be read, or lacks the field.
    """
    if config.prompts is None:
        return list(OWN_PROMPTS)
    prompts: list[str | list[int]] = []
    for source in config.prompts.split(","):
        path, colon, name = source.rpartition(":")
        if not colon or not path or not name:
            raise ConfigError(f"prompts={source}: must be FILE:FIELD")
        found = read_prompts(GenerateConfig(prompts=path, prompt_field=name, limit=config.limit, output="-"))
        prompts += [prompt.value for prompt in found]
    return prompts


def check_bench(config: BenchConfig) -> None:
    """Refuse, before a model is loaded, what cannot be done.

    Raises:
        ConfigError: names the setting.
    """
    read_sources(config)
    if config.output is not None:
        try:
            Path(config.output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output={config.output}: {error.strerror}") from error


def bench(runtime: LookaheadRuntime, config: BenchConfig) -> None:
    """Run the comparison on a runtime that is up, and print its table.

    Raises:
        ConfigError, ModelError: if a prompt or a model cannot be used.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    is_cuda = runtime.info.device.startswith("cuda")
    names = config.methods or [name for name in METHODS if is_cuda or name != "hf_compiled"]
    methods: dict[str, Decode] = huggingface_methods(config, names)
    methods |= runtime_methods(config, runtime, names)
    methods |= critical_path_methods(config, config.degrees)
    prompts = [
        runtime.tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else prompt
        for prompt in read_sources(config)
    ]
    results: dict[str, list[Result]] = {name: [] for name in methods}
    for decode in methods.values():  # what is made or measured at a first request is not to be timed
        decode(prompts[0])
    order = list(methods)
    total = config.rounds * len(prompts) * len(order)
    with contextlib.closing(tqdm(total=total, unit="run", disable=not sys.stderr.isatty(), leave=False)) as bar:
        for _ in range(config.rounds):
            for prompt in prompts:
                order.append(order.pop(0))
                for name in order:
                    results[name].append(methods[name](prompt))
                    bar.update()
    report = Report(config, runtime, len(prompts), results)
    print(report.markdown())
    if config.output is not None:
        report.write(Path(config.output))
