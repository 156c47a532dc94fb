"""Token-for-token equality with `model.generate(do_sample=False)` in float32, over prompts, settings and replicas.

    python benchmarks/correctness.py equality --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --gpus 1 2 3 4

Every run goes on past the end-of-sequence token to exactly --max-new-tokens, on both sides. S is new tokens / steps
over all prompts, the prefills' steps included. With --device cuda --backend gloo several replicas may share a GPU. The
exit status is 1 if an output differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from common import Results, add_prompt_arguments, add_settings_argument, load_prompts, parse_setting, totals

from lp_runtime import LookaheadRuntime
from lp_runtime.config.settings import LauncherConfig, ModelConfig
from lp_runtime.model.loader import load_model, load_tokenizer
from lp_runtime.utils.prompt_file import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    add_settings_argument(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="auto", choices=["auto", "shared", "nccl", "gloo"])


def greedy_reference(
    config: ModelConfig, prompts: Sequence[Prompt], max_new_tokens: int, device: str
) -> list[list[int]]:
    """Return the new tokens of transformers' own greedy decoding, [prompts][max_new_tokens]."""
    model, tokenizer = load_model(config, torch.device(device), "float32"), load_tokenizer(config)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt.value).input_ids], device=device)
        mask = torch.ones_like(ids)
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
        )
        outputs.append(output[0, ids.shape[1] :].tolist())
    return outputs


def run(args: argparse.Namespace) -> int:
    """Compare every prompt's output; 1 if any differs."""
    prompts = load_prompts(args)
    config = ModelConfig(path=args.model)
    expected = greedy_reference(config, prompts, args.max_new_tokens, args.device)
    launcher = LauncherConfig(name="local", backend=args.backend)
    results = Results("equality", args.output, {"S": ".3f", "step tokens": ".1f"})
    num_mismatches = 0
    for gpus in args.gpus:
        with LookaheadRuntime(config, gpus=gpus, launcher=launcher, device=args.device, dtype="float32") as runtime:
            for setting in args.settings:
                lookahead = parse_setting(setting)
                generations = [
                    runtime.generate(prompt.value, args.max_new_tokens, eos=False, lookahead=lookahead)
                    for prompt in prompts
                ]
                wrong = sum(each.token_ids != tokens for each, tokens in zip(generations, expected, strict=True))
                num_mismatches += wrong
                ratio, step_tokens = totals(generations)
                row = {"replicas": gpus, "(W, N, G)": f"({setting})", "prompts": len(prompts), "mismatches": wrong}
                results.add(row | {"S": ratio, "step tokens": step_tokens})
    results.finish(f"{args.max_new_tokens} new tokens a prompt, {args.device}")
    return 1 if num_mismatches else 0
