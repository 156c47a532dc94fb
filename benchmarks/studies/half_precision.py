"""Counts how often lookahead decoding in half precision differs from one token per step.

    python benchmarks/correctness.py half_precision --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --gpus 1 2

Both exactness=fast and exactness=strict are measured. Each prompt is decoded one token per step (W=0, G=0, one
replica), and with every setting on every number of replicas, past the end-of-sequence token to exactly
--max-new-tokens, in --dtype. `differ` counts outputs that are not equal, token for token. `gap` is the difference of
the two largest logits, in one-token decoding, where an output first differs. S is tokens over forward passes. `seconds`
is the time of lookahead decoding, `plain s` that of one token per step at the same exactness. The exit status is 1 if
an output of exactness=strict differs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from common import (
    Results,
    add_prompt_arguments,
    add_settings_argument,
    decode_past_end,
    load_prompts,
    parse_setting,
    totals,
)

from lp_runtime import Generation, LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.model.loading.loader import load_model, load_tokenizer
from lp_runtime.utils.prompt_file import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    add_settings_argument(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--strict-tokens", type=int, default=RuntimeConfig.strict_tokens)


class Margins:
    """Measures how close the two likeliest tokens are, in plain forward passes on the CPU.

    Args:
        config: of the model.
        dtype: of its weights.
    """

    def __init__(self, config: ModelConfig, dtype: str):
        self._model = load_model(config, torch.device("cpu"), dtype)
        self._tokenizer = load_tokenizer(config)

    @torch.inference_mode()
    def where_first_different(self, prompt: Prompt, tokens: Sequence[int], plain: Sequence[int]) -> float:
        """Return the difference of the two largest logits where two outputs of a prompt first differ."""
        place = next(i for i, (a, b) in enumerate(zip(tokens, plain, strict=True)) if a != b)
        ids = self._tokenizer(prompt.value).input_ids
        logits = self._model(input_ids=torch.tensor([[*ids, *plain[:place]]])).logits[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        return first - second


def run(args: argparse.Namespace) -> int:
    """Compare every prompt's output; return 1 if a strict one differs."""
    prompts = load_prompts(args)
    model = ModelConfig(path=args.model)
    margins = Margins(model, args.dtype)
    results = Results("half_precision", args.output, {"S": ".3f", "median gap": ".3f", "seconds": ".0f"})
    num_strict_differ = 0
    for exactness in ("fast", "strict"):
        plain: list[Generation] = []
        for gpus in args.gpus:
            config = RuntimeConfig(
                model=model, gpus=gpus, device=args.device, dtype=args.dtype, exactness=exactness,
                strict_tokens=args.strict_tokens,
            )  # fmt: skip
            with LookaheadRuntime.from_config(config) as runtime:
                plain = plain or decode_all(runtime, prompts, args.max_new_tokens, PLAIN)
                for setting in args.settings:
                    generations = decode_all(runtime, prompts, args.max_new_tokens, parse_setting(setting))
                    gaps = [
                        margins.where_first_different(prompt, each.token_ids, expected.token_ids)
                        for prompt, each, expected in zip(prompts, generations, plain, strict=True)
                        if each.token_ids != expected.token_ids
                    ]
                    num_strict_differ += len(gaps) * (exactness == "strict")
                    row = {"exactness": exactness, "replicas": gpus, "(W, N, G)": f"({setting})"}
                    row |= {"prompts": len(prompts), "differ": len(gaps), "gap 0": sum(gap == 0 for gap in gaps)}
                    row |= {"median gap": statistics.median(gaps) if gaps else None, "S": totals(generations)[0]}
                    row |= {"seconds": sum(each.seconds for each in generations)}
                    results.add(row | {"plain s": sum(each.seconds for each in plain)})
    about = f"{args.dtype}, strict_tokens={args.strict_tokens}, {args.max_new_tokens} new tokens a prompt"
    results.finish(f"{about}, {args.device}")
    return 1 if num_strict_differ else 0


def decode_all(
    runtime: LookaheadRuntime, prompts: Sequence[Prompt], max_new_tokens: int, lookahead: LookaheadConfig
) -> list[Generation]:
    """Decode every prompt greedily, past the end-of-sequence token."""
    return [decode_past_end(runtime, prompt.value, max_new_tokens, lookahead) for prompt in prompts]
