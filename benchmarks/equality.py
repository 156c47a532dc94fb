"""Token-for-token equality with `model.generate(do_sample=False)` in float32, over prompts, settings and replicas.

    python benchmarks/equality.py --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --gpus 1 2 3 4

Every run goes on past the end-of-sequence token to exactly --max-new-tokens, on both sides. Prints, for each setting
and number of replicas, the mismatches (there must be none: the exit status is 1 otherwise), the compression ratio S
(new tokens / steps, prefill included, over all prompts) and the tokens fed a step and replica. With --device cuda
--backend gloo several replicas may share a GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
from common import add_arguments, load_prompts, machine, markdown, parse_setting, totals

from lp_runtime import LookaheadRuntime
from lp_runtime.config.settings import LauncherConfig, ModelConfig
from lp_runtime.model.loader import load_model, load_tokenizer


def greedy_reference(config: ModelConfig, prompts: list, max_new_tokens: int, device: str) -> list[list[int]]:
    """New tokens of transformers' own greedy decoding, [prompts][max_new_tokens]."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="auto", choices=["auto", "nccl", "gloo"])
    args = parser.parse_args()
    prompts = load_prompts(args)
    config = ModelConfig(path=args.model)
    expected = greedy_reference(config, prompts, args.max_new_tokens, args.device)
    launcher = LauncherConfig(name="local", backend=args.backend)
    rows, num_mismatches = [], 0
    for gpus in args.gpus:
        with LookaheadRuntime(config, gpus=gpus, launcher=launcher, device=args.device, dtype="float32") as runtime:
            for setting in args.settings:
                runs = [
                    runtime.generate(p.value, args.max_new_tokens, eos=False, lookahead=parse_setting(setting))
                    for p in prompts
                ]
                wrong = sum(run.token_ids != tokens for run, tokens in zip(runs, expected, strict=True))
                num_mismatches += wrong
                ratio, fed = totals(runs)
                rows.append([gpus, f"({setting})", len(prompts), wrong, f"{ratio:.3f}", f"{fed:.1f}"])
                print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}; {args.max_new_tokens} new tokens a prompt\n")
    print(markdown(["replicas", "(W, N, G)", "prompts", "mismatches", "S", "tokens fed a step and replica"], rows))
    sys.exit(1 if num_mismatches else 0)


if __name__ == "__main__":
    main()
