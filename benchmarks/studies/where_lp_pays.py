"""Measures S and step time by LP degree: dense and expert models, quantized weights, long prefixes.

    python experiments/inflate_model.py --from REAL --shape 1b --kv-heads 16 --heads 32 --out 1b
    python experiments/inflate_model.py --from REAL --shape 1b --kv-heads 16 --heads 32 --experts 8 --out 1b_experts
    python benchmarks/speed.py where_lp_pays --models dense=1b experts=1b_experts int8=1b int4=1b \\
        --prompts humaneval.jsonl:prompt --limit 4 --prefixes 512 8000 --degrees 1 2 4 8 --processes

There is a row for each model, prefix and degree, measured by critical path: every replica's share of a step runs alone,
one after the other, and the slowest counts. `forward ms` is the slowest share's forward pass, averaged over steps.
`tokens/s` is of decoding, the prefill excluded, with an exchange of --exchange-us in every step. With --budget every
replica feeds that many tokens at every degree; without it lookahead=auto chooses. A model whose name begins with int8
or int4 is quantized while it is loaded (weights only, by torchao, the extra `quantized`; its int4 weights of CPUs are
stored in bytes). With --processes, there are also rows of one and two real processes, to compare with the critical
paths of one and two. Each of --limit prompts has --prefixes tokens of the concatenated texts of all files, each from
another place. Outputs are compared with one token per step; the exit status is 1 if any differs.

Nothing else must run on the machine, and a process of one thread must be as fast next to another as alone.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common import GREEDY, Results, Value, add_prompt_arguments, decode_past_end, load_prompts

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.bench.critical_path import CriticalPathRunner
from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import ModelError
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.replica.loading import choose_device, ready_model
from lp_runtime.request.request import Request

QUANTIZATIONS = {
    "int8": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}},
    "int4": {
        "_type": "IntxWeightOnlyConfig",
        "_version": 2,
        "_data": {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}},
    },
}


@dataclass
class Path:
    """Sums over the prompts of one row.

    Attributes:
        num_tokens: new tokens.
        num_steps: steps, prefills included.
        num_fed: tokens that the busiest replica fed, over all steps except the prefills'.
        forward_seconds: time of the slowest shares; 0 if unknown.
        decode_seconds: time of all steps except the prefills'.
        texts: the new tokens of each prompt.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_fed: float = 0.0
    forward_seconds: float = 0.0
    decode_seconds: float = 0.0
    texts: tuple[tuple[int, ...], ...] = ()

    def add(
        self,
        token_ids: Sequence[int],
        num_steps: int,
        step_tokens: float,
        forward_seconds: float,
        decode_seconds: float,
    ) -> None:
        """Add one prompt."""
        self.num_tokens += len(token_ids)
        self.num_steps += num_steps
        self.num_fed += step_tokens * (num_steps - 1)
        self.forward_seconds += forward_seconds
        self.decode_seconds += decode_seconds
        self.texts += (tuple(token_ids),)

    def row(self, num_prompts: int) -> dict[str, Value]:
        """Return the row's figures; decoding begins after the first token."""
        num_steps = max(1, self.num_steps - num_prompts)
        return {
            "S": self.num_tokens / self.num_steps,
            "tokens a step": self.num_fed / num_steps,
            "forward ms": 1000 * self.forward_seconds / num_steps if self.forward_seconds else None,
            "tokens/s": (self.num_tokens - num_prompts) / self.decode_seconds,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser, limit=4, max_new_tokens=64)
    parser.add_argument("--models", nargs="+", default=["dense="], metavar="NAME=DIR", help="instead of --model")
    parser.add_argument("--prefixes", nargs="+", type=int, default=[512], help="tokens of a prompt")
    parser.add_argument("--degrees", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument(
        "--budget", type=int, default=None, help="tokens per replica and step; lookahead=auto if not given"
    )
    parser.add_argument("--exchange-us", type=float, default=100.0)
    parser.add_argument("--processes", action="store_true", help="also measure one and two real processes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")


def prefixes_of(text_ids: Sequence[int], length: int, num_prompts: int) -> list[tuple[int, ...]]:
    """Return prompts of a length from a text, which is repeated if it is too short."""
    repeated = [*text_ids] * (1 + length // max(1, len(text_ids)) + 1)
    stride = max(1, len(text_ids) // num_prompts)
    return [tuple(repeated[number * stride :][:length]) for number in range(num_prompts)]


def quantization_of(name: str) -> str | None:
    """Return the key in QUANTIZATIONS of a quantized variant; None for others."""
    return next((kind for kind in QUANTIZATIONS if name.startswith(kind)), None)


def check_packages(name: str) -> None:
    """Raise a ModelError if a variant needs a package that is not installed."""
    if quantization_of(name) and importlib.util.find_spec("torchao") is None:
        raise ModelError(f"--models {name}=...: needs the package torchao: pip install -e '.[quantized]'")


def config_of(name: str, location: str, args: argparse.Namespace, gpus: int) -> RuntimeConfig:
    """Return the settings for loading a variant."""
    kind = quantization_of(name)
    quantization = None if kind is None else {"quant_method": "torchao", "quant_type": {"default": QUANTIZATIONS[kind]}}
    model = ModelConfig(path=location or args.model, quantization_config=quantization)
    return RuntimeConfig(model=model, gpus=gpus, device=args.device, dtype=args.dtype)


def critical_paths(
    config: RuntimeConfig, args: argparse.Namespace, prompts: Sequence[tuple[int, ...]]
) -> Iterator[tuple[str, Path]]:
    """Yield (label, sums) of one token per step, and of each degree."""
    model, _ = ready_model(config, choose_device(args.device, 0))
    calibration = Calibration(model, Group.alone(), config.cache_dir)
    for degree in [0, *args.degrees]:
        runner, path = CriticalPathRunner(model, calibration, max(1, degree)), Path()
        lookahead = LookaheadConfig(tokens=args.budget) if degree else PLAIN
        for prompt in prompts:
            output = runner.run(Request(prompt, lookahead, args.max_new_tokens, sampling=GREEDY))
            decode = output.forward_seconds + output.other_seconds
            if degree:
                decode += 1e-6 * args.exchange_us * (output.num_steps - 1)
            path.add(output.token_ids, output.num_steps, output.step_tokens, output.forward_seconds, decode)
        yield (f"LP {degree}" if degree else "one token a step"), path


def processes(config: RuntimeConfig, args: argparse.Namespace, prompts: Sequence[tuple[int, ...]], num: int) -> Path:
    """Return the sums of `num` real processes."""
    path = Path()
    with LookaheadRuntime.from_config(config) as runtime:
        for prompt in prompts:
            output = decode_past_end(runtime, prompt, args.max_new_tokens, LookaheadConfig(tokens=args.budget))
            decode = output.seconds - output.prefill_seconds
            path.add(output.token_ids, output.steps, output.step_tokens, 0.0, decode)
    return path


def run(args: argparse.Namespace) -> int:
    """Measure every model, prefix and degree."""
    results = Results("where_lp_pays", args.output, {"tokens a step": ".1f", "forward ms": ".1f", "over LP 1": ".2f"})
    num_wrong = 0
    for variant in args.models:
        check_packages(variant.partition("=")[0])
    for variant in args.models:
        name, _, location = variant.partition("=")
        config = config_of(name, location, args, 1)
        tokenizer = load_tokenizer(config.model)
        everything = argparse.Namespace(prompts=args.prompts, limit=1 << 30)
        texts = ["\n".join(prompt.turns) for prompt in load_prompts(everything)]
        ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
        for length in args.prefixes:
            prompts = prefixes_of(ids, length, args.limit)
            paths = dict(critical_paths(config, args, prompts))
            if args.processes:
                for num in (1, 2):
                    measured = processes(config_of(name, location, args, num), args, prompts, num)
                    paths[f"LP {num}, {num} process{'es' if num > 1 else ''}"] = measured
            base = paths[f"LP {args.degrees[0]}"]
            for label, path in paths.items():
                row = {"model": name, "prefix": length, "replicas": label} | path.row(len(prompts))
                over = (path.num_tokens / path.decode_seconds) / (base.num_tokens / base.decode_seconds)
                num_differ = sum(
                    one != other for one, other in zip(path.texts, paths["one token a step"].texts, strict=True)
                )
                num_wrong += num_differ
                results.add(row | {f"over LP {args.degrees[0]}": over, "outputs that differ": num_differ})
    about = f"{args.limit} prompts, {args.max_new_tokens} new tokens, {args.dtype}"
    results.finish(f"{about}, exchanges of {args.exchange_us:g} us on critical paths")
    return 1 if num_wrong else 0
