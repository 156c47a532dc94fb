"""lp-generate with one prompt: text streamed to the terminal, then a summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SAMPLING_ONLY, SamplingConfig
from lp_runtime.errors import ConfigError
from lp_runtime.model.tokenizer import conversation
from lp_runtime.request.generation import Generation, GenerationStream
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.runtime import LookaheadRuntime


def generate_one(runtime: LookaheadRuntime, config: GenerateConfig, prompt: str | list[int]) -> None:
    """Stream a prompt's continuation to stdout, then print a summary to stderr.

    Several samples are streamed one after another. With compare=true the prompt is decoded once more, with one token
    per step. If the model has no tokenizer, new token ids are printed.
    """
    options = request_options(config)
    check_num_samples(runtime, config)
    asked: str | list[int] | None = prompt
    if config.chat:
        assert isinstance(prompt, str)  # GenerateConfig refuses chat=true with ids=true
        asked, options["messages"] = None, conversation([prompt])
        prompt += "\n"  # print the answer on a new line
    rows = []
    for sample in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- sample {sample}:", file=sys.stderr)
        options["sample"] = sample
        stream = runtime.stream(asked, config.max_new_tokens, **options)
        generation = _echo(stream, prompt)
        options["sampling"] = replace(runtime.config.sampling, seed=generation.seed)
        rows.append(("lookahead", generation))
    if config.compare:
        print("\n--- the same prompt, one token a step:", file=sys.stderr)
        options["lookahead"] = PLAIN
        plain = runtime.generate(asked, config.max_new_tokens, **options)
        rows.append(("one token a step", plain))
    print(summary(runtime, config.lookahead, rows, config.compare), file=sys.stderr)


def request_options(config: GenerateConfig) -> RequestOptions:
    return RequestOptions(
        eos=config.eos,
        stop=config.stop,
        max_time=config.max_time,
        logprobs=config.logprobs,
        constraint=config.constraint,
    )


def check_num_samples(runtime: LookaheadRuntime, config: GenerateConfig) -> None:
    """Check that several samples are not decoded greedily, which would make them equal."""
    if config.num_samples > 1 and not config.sampling.samples(runtime.info.defaults):
        raise ConfigError(f"num_samples={config.num_samples}: decoding is greedy; give sampling.temperature > 0")


def _echo(stream: GenerationStream, prompt: str | list[int]) -> Generation:
    if isinstance(prompt, str):
        print(prompt, end="", flush=True)  # `stream` exists, so the request has been accepted
    for delta in stream:
        text = delta.text if stream.has_text else "".join(f"{token} " for token in delta.token_ids)
        print(text, end="", flush=True)
    print(flush=True)
    assert stream.generation is not None  # the iteration has ended
    return stream.generation


def describe_sampling(config: SamplingConfig, defaults: Mapping[str, Any], seed: int | None) -> str:
    """Describe sampling in one line, and mark the model's defaults; `seed` is None if decoding was greedy."""
    unused = ("seed", *(SAMPLING_ONLY if seed is None else ()))
    given = {name: value for name, value in asdict(config).items() if value is not None}
    settings = [f"{name} {value}" for name, value in given.items() if name not in unused]
    settings += [
        f"{name} {value} (the model's)"
        for name, value in defaults.items()
        if name not in (*given, *unused, "do_sample", "max_new_tokens", "max_length")
    ]
    return ", ".join(["greedy" if seed is None else f"sampling, seed {seed}", *settings])


def describe_lookahead(config: LookaheadConfig) -> str:
    W, N, G = config.window
    size = "auto" if config.is_auto else f"W={W} N={N} G={G}" if config.tokens is None else f"tokens={config.tokens}"
    budget = "" if config.budget is None else f" budget={config.budget}"
    return f"drafter {config.drafter} {size if config.drafter in ('full', 'paper') else ''}".rstrip() + budget


def summary(
    runtime: LookaheadRuntime, lookahead: LookaheadConfig, rows: list[tuple[str, Generation]], compare: bool
) -> str:
    """Format a table of labelled generations; if `compare`, report whether the last two have equal tokens."""
    info = runtime.info
    lines = [
        f"\n{runtime.num_replicas} replica{'s' * (runtime.num_replicas > 1)} on {info.device.split(':')[0]},"
        f" {info.dtype} ({runtime.config.exactness}), {describe_lookahead(lookahead)};"
        f" {describe_sampling(runtime.config.sampling, info.defaults, rows[0][1].seed)}"
        f"{'' if info.not_captured is None else f'; passes are not captured: {info.not_captured}'}",
        f"{'':18}{'tokens':>8}{'steps':>8}{'compression ratio':>20}{'tokens fed a step':>20}"
        f"{'seconds':>10}{'tokens/s':>10}",
    ]
    for name, generation in rows:
        lines.append(
            f"{name:18}{generation.num_tokens:8}{generation.steps:8}{generation.compression_ratio:20.2f}"
            f"{generation.step_tokens:20.1f}{generation.seconds:10.2f}{generation.tokens_per_second:10.1f}"
        )
    counts = rows[0][1].counts
    by_source = zip(counts.sources, map(sum, counts.accepted), map(sum, counts.fed), strict=True)
    parts = [f"{name} {hits}/{total}" for name, hits, total in by_source if total]
    lines.append(f"draft tokens accepted / fed, by source: {', '.join(parts) or 'none fed'}")
    if num_without := sum(generation.steps_without_drafter for _, generation in rows):
        lines.append(f"the drafter was still being compiled in {num_without} of these steps, once per machine")
    if compare:
        same = rows[-2][1].token_ids == rows[-1][1].token_ids
        lines.append(f"the same tokens: {'yes' if same else 'NO'}")
    return "\n".join(lines)
