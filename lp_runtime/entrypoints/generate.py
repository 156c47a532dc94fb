"""One prompt on the terminal: text as it comes, then a summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import WARPERS, SamplingConfig
from lp_runtime.engine.generation import Generation, GenerationStream
from lp_runtime.engine.request_builder import RequestOptions
from lp_runtime.errors import ConfigError
from lp_runtime.runtime import LookaheadRuntime


def generate_one(runtime: LookaheadRuntime, config: GenerateConfig, prompt: str | list[int]) -> None:
    """Stream a prompt's continuation to stdout and a summary to stderr; with compare=true, once more plainly.

    Of several samples, each is streamed in turn. Without a tokenizer, which a prompt of ids can do without, the new
    token ids are printed.
    """
    options = request_options(config)
    check_num_samples(runtime, config)
    rows = []
    for sample in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- sample {sample}:", file=sys.stderr)
        stream = runtime.stream(prompt, config.max_new_tokens, sample=sample, **options)
        generation = _echo(stream, prompt)
        options["sampling"] = replace(runtime.config.sampling, seed=generation.seed)
        rows.append(("lookahead", generation))
    if config.compare:
        print("\n--- the same prompt, one token a step:", file=sys.stderr)
        plain = runtime.generate(prompt, config.max_new_tokens, lookahead=PLAIN, **options)
        rows.append(("one token a step", plain))
    print(summary(runtime, config.lookahead, rows, config.compare), file=sys.stderr)


def request_options(config: GenerateConfig) -> RequestOptions:
    """What the command line says of every request."""
    return RequestOptions(eos=config.eos, stop=config.stop, max_time=config.max_time, logprobs=config.logprobs)


def check_num_samples(runtime: LookaheadRuntime, config: GenerateConfig) -> None:
    """Refuse several samples of what has but one.

    Raises:
        ConfigError: if decoding is greedy.
    """
    if config.num_samples > 1 and not config.sampling.draws(runtime.info.defaults):
        raise ConfigError(f"num_samples={config.num_samples}: decoding is greedy; give sampling.temperature > 0")


def _echo(stream: GenerationStream, prompt: str | list[int]) -> Generation:
    if isinstance(prompt, str):
        print(prompt, end="", flush=True)  # now that the request is known to be good
    for piece in stream:
        text = piece.text if stream.has_text else "".join(f"{token} " for token in piece.token_ids)
        print(text, end="", flush=True)
    print(flush=True)
    return stream.generation


def describe_sampling(config: SamplingConfig, defaults: Mapping[str, Any], seed: int | None) -> str:
    """How successors were drawn, in one line, and what of it is the model's own default."""
    given = {name: value for name, value in asdict(config).items() if value is not None and name != "seed"}
    drawing = "greedy" if seed is None else f"sampling, seed {seed}"
    unused = WARPERS if seed is None else ()
    settings = [f"{name} {value}" for name, value in given.items() if name not in unused]
    settings += [
        f"{name} {value} (the model's)"
        for name, value in defaults.items()
        if name not in given and name not in unused and name not in ("do_sample", "max_new_tokens", "max_length")
    ]
    return ", ".join([drawing, *settings])


def describe_lookahead(config: LookaheadConfig) -> str:
    """What is proposed, in a few words."""
    W, N, G = config.window
    size = "auto" if config.is_auto else f"W={W} N={N} G={G}"
    budget = "" if config.budget is None else f" budget={config.budget}"
    return f"drafter {config.drafter} {size if config.drafter in ('full', 'paper') else ''}".rstrip() + budget


def summary(
    runtime: LookaheadRuntime, lookahead: LookaheadConfig, rows: list[tuple[str, Generation]], compare: bool
) -> str:
    """The runs as a table, with the settings above."""
    info = runtime.info
    lines = [
        f"\n{runtime.num_replicas} replica{'s' * (runtime.num_replicas > 1)} on {info.device.split(':')[0]},"
        f" {info.dtype} ({runtime.config.exactness}), {describe_lookahead(lookahead)};"
        f" {describe_sampling(runtime.config.sampling, info.defaults, rows[0][1].seed)}",
        f"{'':18}{'tokens':>8}{'steps':>8}{'compression ratio':>20}{'tokens fed a step':>20}"
        f"{'seconds':>10}{'tokens/s':>10}",
    ]
    for name, run in rows:
        lines.append(
            f"{name:18}{run.num_tokens:8}{run.steps:8}{run.compression_ratio:20.2f}{run.step_tokens:20.1f}"
            f"{run.seconds:10.2f}{run.tokens_per_second:10.1f}"
        )
    counts = rows[0][1].counts
    accepted, fed = counts.accepted.sum(axis=1), counts.fed.sum(axis=1)
    parts = [f"{name} {took}/{had}" for name, took, had in zip(counts.sources, accepted, fed, strict=True) if had]
    lines.append(f"accepted of the guesses fed, by where they came from: {', '.join(parts) or 'none fed'}")
    if compare:
        same = rows[-2][1].token_ids == rows[-1][1].token_ids
        lines.append(f"the same tokens: {'yes' if same else 'NO'}")
    return "\n".join(lines)
