"""Compares code edits with and without the file as predicted output: tokens per second and S.

    python benchmarks/speed.py prediction --model DIR --prompts classeval.jsonl:prompt --limit 100

The model is asked to rename one method of a class and to answer with the whole class. The class is in the prompt, as
clients send it; a model without a chat template gets it as text. Each edit is decoded without and with `prediction`, in
alternating order. S = new tokens / steps, the prefill's step included. The exit status is 1 if any two texts differ.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from common import GREEDY, Results, add_prompt_arguments, load_prompts

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.request.generation import Generation

TASK = "Rename the method {old} to {new}. Answer with the whole class and nothing else.\n```python\n{code}\n```"
HOW = ("without", "with")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser, limit=100, max_new_tokens=192)
    parser.add_argument("--edits", type=int, default=20, help="number of edits, of the shortest classes")


def edits(classes: Iterable[str], num: int) -> list[tuple[str, str]]:
    """Return (question, class) of the shortest classes that have a method to rename."""
    edits = []
    for code in sorted(classes, key=len):
        methods = [name for name in re.findall(r"def (\w+)\(", code) if not name.startswith("_")]
        if methods:
            edits.append((TASK.format(old=methods[0], new=f"{methods[0]}_checked", code=code), code))
    return edits[:num]


def run(args: argparse.Namespace) -> int:
    """Decode every edit in both ways; return 1 if any text differs."""
    torch.set_num_threads(1)
    done: dict[str, list[Generation]] = {how: [] for how in HOW}
    apart = LookaheadConfig(draft_tables="request")  # else the second answer would draft from the first
    with LookaheadRuntime(args.model, device="cpu", dtype="float32", lookahead=apart) as runtime:
        runtime.generate("x", 16)  # warm up
        classes = [each.turns[0] for each in load_prompts(args)]
        for number, (question, code) in enumerate(edits(classes, args.edits)):
            for how in HOW if number % 2 else reversed(HOW):
                asked: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "sampling": GREEDY}
                if not runtime.tokenizer.chat_template:
                    asked = {"prompt": question, "sampling": GREEDY}
                prediction = code if how == "with" else ""
                answer = runtime.generate(max_new_tokens=args.max_new_tokens, prediction=prediction, **asked)
                done[how].append(answer)
    results = Results("prediction", args.output, {"tokens/s": ".1f"})
    for how, answers in done.items():
        num_tokens, num_steps = sum(each.num_tokens for each in answers), sum(each.steps for each in answers)
        seconds = sum(each.seconds - each.prefill_seconds for each in answers)
        row: dict[str, str | int | float] = {"prediction": how, "edits": len(answers), "new tokens": num_tokens}
        results.add(row | {"S": num_tokens / num_steps, "tokens/s": num_tokens / seconds})
    pairs = list(zip(done["without"], done["with"], strict=True))
    num_wrong = sum(one.token_ids != other.token_ids for one, other in pairs)
    ratios = [(one.seconds - one.prefill_seconds) / (other.seconds - other.prefill_seconds) for one, other in pairs]
    about = f"seconds without / with, median {statistics.median(ratios):.2f}, no prefills; {num_wrong} texts differ"
    results.finish(f"{args.model or 'demo model'}, float32, greedy, {about}")
    return 1 if num_wrong else 0
