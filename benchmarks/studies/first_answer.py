"""Times a new process's first answers with an empty cache, with a filled one, and without prior.

    python benchmarks/speed.py first_answer --model REAL --prompts humaneval.jsonl:prompt --limit 3

The prior is the vocabulary prior, and the cache keeps it on disk. Each row is a separate runtime: the seconds until it
was ready, and those of its first three answers. `again` has the cache that `empty cache` left, and queries the rest.
"""

from __future__ import annotations

import argparse
import tempfile
import time

from common import Results, Value, add_prompt_arguments, decode_past_end, load_prompts

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config.settings import ModelConfig, RuntimeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser, limit=3, max_new_tokens=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")


def run(args: argparse.Namespace) -> int:
    """Measure the three starts."""
    prompts = [str(prompt.value) for prompt in load_prompts(args)]
    results = Results("first_answer", args.output, {})
    texts = []
    with tempfile.TemporaryDirectory() as cache:
        for label, prior in (("empty cache", "vocabulary"), ("again", "vocabulary"), ("prior=none", "none")):
            config = RuntimeConfig(
                model=ModelConfig(path=args.model),
                device=args.device,
                dtype=args.dtype,
                lookahead=LookaheadConfig(prior=prior),
                cache_dir=cache,
                gpus=1,
            )
            row: dict[str, Value] = {"start": label}
            started = time.perf_counter()
            with LookaheadRuntime.from_config(config) as runtime:
                row["ready s"] = time.perf_counter() - started
                generations = []
                for number, prompt in enumerate(prompts, 1):
                    asked = time.perf_counter()
                    generations.append(decode_past_end(runtime, prompt, args.max_new_tokens))
                    row[f"answer {number} s"] = time.perf_counter() - asked
            row["S"] = sum(each.num_tokens for each in generations) / sum(each.steps for each in generations)
            texts.append([each.token_ids for each in generations])
            results.add(row)
    num_wrong = sum(each != texts[0] for each in texts)
    results.finish(f"{len(prompts)} prompts, {args.max_new_tokens} new tokens, starts with other texts: {num_wrong}")
    return 1 if num_wrong else 0
