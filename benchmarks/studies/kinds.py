"""Compares tokens per second with one token per step, by setting, kind of prompt and temperature.

    python benchmarks/speed.py kinds --prompts spec_bench.jsonl:turns --limit 480 --each 3 --temperatures 0 0.7 1.0
    python benchmarks/speed.py kinds --model DIR --chat --eos --prompts spec_bench.jsonl:turns --limit 480 --each 2 \\
        --temperatures 0 --settings auto tokens=4 tokens=8 tokens=16 tokens=32 tokens=64

A setting is a drafter and a step size. Every prompt is decoded with every setting, one after the other, in an order
that rotates from prompt to prompt. The columns are tokens per second of decoding relative to one token per step, over
all prompts of a kind, the prefill excluded. Further columns are the first setting relative to the best of the others
(one token per step included), and the first setting's worst prompt. Nothing else must run on the machine. The exit
status is 1 if an output differs from that of one token per step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from common import Results, add_prompt_arguments, add_settings_argument, load_tasks, parse_setting
from workloads import Task, texts_of

from lp_runtime import Generation, LookaheadRuntime, SamplingConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import ModelConfig

SETTINGS = ("auto", "prompt_lookup:auto", "paper:15,5,15")
ALL = "all"  # the row of all kinds


@dataclass
class Kind:
    """Measurements of the prompts of one kind at one temperature.

    Attributes:
        plain: seconds of decoding one token per step, a value per prompt.
        seconds: seconds of decoding by setting, a value per prompt.
        step_tokens: step tokens with the first setting, a value per prompt.
    """

    plain: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    step_tokens: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Return the columns of a row."""
        speed = {name: sum(self.plain) / sum(each) for name, each in self.seconds.items()}
        first, *others = speed
        worst = min(plain / each for plain, each in zip(self.plain, self.seconds[first], strict=True))
        return speed | {
            f"{first} over the best other": speed[first] / max([1.0, *(speed[name] for name in others)]),
            f"{first}, worst prompt": worst,
            f"{first}, step tokens": sum(self.step_tokens) / len(self.step_tokens),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    add_settings_argument(parser, SETTINGS)
    parser.add_argument("--each", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompts")
    parser.add_argument("--eos", action="store_true", help="stop at end-of-text instead of decoding past it")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")


def decode_seconds(generation: Generation) -> float:
    """Return the seconds spent after the prefill's step."""
    return generation.seconds - generation.prefill_seconds


def run(args: argparse.Namespace) -> int:
    """Measure every kind at every temperature; return 1 if any output differs."""
    tasks = [task for task in load_tasks(args) if not task.has_own_answer]
    results = Results("kinds", args.output, {f"{args.settings[0]}, step tokens": ".1f"})
    num_wrong = 0
    options = {"launcher": "local", "device": args.device, "dtype": args.dtype, "gpus": args.gpus}
    with LookaheadRuntime(ModelConfig(path=args.model), **options) as runtime:

        def decode(task: Task, setting: str | None, sampling: SamplingConfig) -> Generation:
            lookahead = PLAIN if setting is None else parse_setting(setting)
            given = {"messages": task.messages} if args.chat else {"prompt": texts_of(task.messages)}
            return runtime.generate(
                **given, max_new_tokens=args.max_new_tokens, eos=args.eos, lookahead=lookahead, sampling=sampling
            )

        for temperature in args.temperatures:
            order: list[str | None] = [None, *args.settings]
            kinds = {kind: Kind() for kind in [*(task.kind for task in tasks), ALL]}
            for number, task in enumerate(tasks):
                sampling = SamplingConfig(temperature=temperature, seed=number if temperature else None)
                order.append(order.pop(0))
                decoded = {setting: decode(task, setting, sampling) for setting in order}
                plain = decoded.pop(None)
                num_wrong += sum(each.token_ids != plain.token_ids for each in decoded.values())
                for measured in (kinds[task.kind], kinds[ALL]):
                    measured.plain.append(decode_seconds(plain))
                    for name in args.settings:
                        measured.seconds.setdefault(name, []).append(decode_seconds(decoded[name]))
                    measured.step_tokens.append(decoded[args.settings[0]].step_tokens)
            for kind, measured in kinds.items():
                results.add({"temperature": temperature, "kind": kind} | measured.row())
    about = f"{len(tasks)} prompts, {args.max_new_tokens} new tokens each, {args.gpus} replica(s)"
    results.finish(f"{about}, outputs that differ: {num_wrong}")
    return 1 if num_wrong else 0
