"""Compares outputs with `model.generate(do_sample=False)` in float32, token for token.

    python benchmarks/correctness.py equality --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --gpus 1 2 3 4

Every prompt is decoded with every setting and number of replicas, past the end-of-sequence token to exactly
--max-new-tokens, on both sides. S is new tokens / steps over all prompts, the prefills' steps included. With --device
cuda --backend gloo several replicas may share a GPU.

Shards of a replica sum in a different order than one process, which may flip near ties of logits. For an output that
differs, the gap between the two tokens' logits at the first difference is reported. The exit status is 1 if an output
differs, or, with several shards, if it differs by more than NEAR_TIE.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from common import (
    Results,
    add_prompt_arguments,
    add_settings_argument,
    add_shards_argument,
    decode_past_end,
    generate_greedily,
    load_prompts,
    parse_setting,
    totals,
)

from lp_runtime import LookaheadRuntime
from lp_runtime.config.settings import LauncherConfig, ModelConfig
from lp_runtime.model.loading.loader import load_model, load_tokenizer
from lp_runtime.utils.prompt_file import Prompt

NEAR_TIE = 1e-3  # difference of logits; float32 rounding of a forward pass is an order of magnitude smaller


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    add_settings_argument(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 3, 4])
    add_shards_argument(parser)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="auto", choices=["auto", "shared", "nccl", "gloo"])


class Reference:
    """Greedy decoding of transformers itself."""

    def __init__(self, config: ModelConfig, device: str):
        self._model, self._tokenizer = load_model(config, torch.device(device), "float32"), load_tokenizer(config)
        self._model.generation_config.eos_token_id = None

    def outputs(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Return new tokens, [prompts][max_new_tokens]."""
        outputs = []
        for prompt in prompts:
            ids = self._tokenizer(prompt.value).input_ids
            outputs.append(generate_greedily(self._model, ids, max_new_tokens))
        return outputs

    @torch.inference_mode()
    def gap(self, prompt: Prompt, expected: Sequence[int], actual: Sequence[int]) -> float:
        """Return the gap between the logits of two outputs' tokens where the outputs first differ."""
        place = next(index for index, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1])
        ids = [*self._tokenizer(prompt.value).input_ids, *expected[:place]]
        logits = self._model(torch.tensor([ids], device=self._model.device)).logits[0, -1]
        return float(logits[expected[place]] - logits[actual[place]])


def run(args: argparse.Namespace) -> int:
    """Compare every prompt's output; return 1 if any differs."""
    prompts = load_prompts(args)
    config = ModelConfig(path=args.model)
    reference = Reference(config, args.device)
    expected = reference.outputs(prompts, args.max_new_tokens)
    launcher = LauncherConfig(name="local", backend=args.backend)
    results = Results("equality", args.output, {"S": ".3f", "step tokens": ".1f", "largest gap": ".1e"})
    num_wrong, num_shards = 0, args.gpus_per_replica
    for gpus in args.gpus:
        with LookaheadRuntime(
            config, gpus, launcher, device=args.device, dtype="float32", gpus_per_replica=num_shards
        ) as runtime:
            for setting in args.settings:
                lookahead = parse_setting(setting)
                generations = [
                    decode_past_end(runtime, prompt.value, args.max_new_tokens, lookahead) for prompt in prompts
                ]
                gaps = [
                    reference.gap(prompt, tokens, each.token_ids)
                    for prompt, each, tokens in zip(prompts, generations, expected, strict=True)
                    if each.token_ids != tokens
                ]
                num_wrong += sum(num_shards == 1 or gap > NEAR_TIE for gap in gaps)
                ratio, step_tokens = totals(generations)
                row = {"replicas": runtime.num_replicas, "shards": num_shards, "(W, N, G)": f"({setting})"}
                row |= {"prompts": len(prompts), "mismatches": len(gaps), "largest gap": max(gaps, default=None)}
                results.add(row | {"S": ratio, "step tokens": step_tokens})
    results.finish(f"{args.max_new_tokens} new tokens a prompt, {args.device}")
    return 1 if num_wrong else 0
