"""Half precision: how often does lookahead decoding differ from one token a step? exactness=fast beside strict.

    python benchmarks/half_precision.py --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --gpus 1 2

Each text is decoded one token a step (W=0, G=0, one replica) and with every setting on every number of replicas, past
the end-of-sequence token to exactly --max-new-tokens, in --dtype. `differ` counts texts that are not equal, token for
token; "gap" is the difference of the two largest logits, in one-token decoding, where a text first differs. S is tokens
over forward passes; seconds are of lookahead decoding, "plain s" of one token a step at the same exactness. The exit
status is 1 if a strict text differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from common import add_arguments, load_prompts, machine, markdown, parse_setting

from lp_runtime import LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.model.loader import load_model, load_tokenizer


def gap_at(model, prompt: list[int], tokens: list[int], place: int) -> float:
    """The difference of the two largest logits from which token `place` is taken, fed in one plain pass."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + tokens[:place]])).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return first - second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--strict-tokens", type=int, default=RuntimeConfig.strict_tokens)
    args = parser.parse_args()
    prompts = load_prompts(args)
    model_config = ModelConfig(path=args.model)
    model, tokenizer = load_model(model_config, torch.device("cpu"), args.dtype), load_tokenizer(model_config)
    rows, strict_differ = [], 0
    for exactness in ("fast", "strict"):
        plain: list = []
        for gpus in args.gpus:
            config = RuntimeConfig(
                model=model_config, gpus=gpus, device=args.device, dtype=args.dtype, exactness=exactness,
                strict_tokens=args.strict_tokens,
            )  # fmt: skip
            with LookaheadRuntime.from_config(config) as runtime:

                def decode(lookahead, runtime=runtime):
                    return [
                        runtime.generate(p.value, args.max_new_tokens, eos=False, lookahead=lookahead) for p in prompts
                    ]

                plain = plain or decode(PLAIN)
                for setting in args.settings:
                    runs = decode(parse_setting(setting))
                    gaps = []
                    for prompt, run, expected in zip(prompts, runs, plain, strict=True):
                        if run.token_ids != expected.token_ids:
                            pairs = zip(run.token_ids, expected.token_ids, strict=True)
                            place = next(i for i, (a, b) in enumerate(pairs) if a != b)
                            ids = tokenizer(prompt.value).input_ids
                            gaps.append(gap_at(model, ids, expected.token_ids, place))
                    strict_differ += len(gaps) * (exactness == "strict")
                    tokens, steps = sum(run.num_tokens for run in runs), sum(run.steps for run in runs)
                    seconds, plain_seconds = (sum(run.seconds for run in each) for each in (runs, plain))
                    zero = sum(gap == 0 for gap in gaps)
                    shown = f"{zero} of {len(gaps)} zero, median {statistics.median(gaps):.3f}" if gaps else "-"
                    rows.append(
                        [exactness, gpus, f"({setting})", len(prompts), len(gaps), shown, f"{tokens / steps:.3f}",
                         f"{seconds:.0f}", f"{plain_seconds:.0f}"]
                    )  # fmt: skip
                    print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}; {args.dtype}, strict_tokens={args.strict_tokens}, {args.max_new_tokens} new tokens a prompt\n")
    header = ["exactness", "replicas", "(W, N, G)", "prompts", "differ", "gap", "S (passes)", "seconds", "plain s"]
    print(markdown(header, rows))
    sys.exit(1 if strict_differ else 0)


if __name__ == "__main__":
    main()
