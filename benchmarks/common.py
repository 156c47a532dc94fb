"""What the benchmark commands share: prompts by file, settings by W,N,G, tables."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib import metadata

import torch

from lp_runtime import Generation, LookaheadConfig
from lp_runtime.utils.prompt_file import Prompt, read_prompts

SETTINGS = ("5,3,5", "7,5,7", "15,5,15")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every benchmark of prompts takes."""
    parser.add_argument("--model", default=None, help="directory or hub id; the demo model if not given")
    parser.add_argument(
        "--prompts", nargs="+", required=True, metavar="FILE:FIELD", help="JSON-lines files and the field to read"
    )
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--settings",
        nargs="+",
        default=SETTINGS,
        metavar="[POLICY:]W,N,G",
        help="or [POLICY:]auto; default drafter full",
    )


def load_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The first `limit` prompts of every file, in order."""
    prompts = []
    for source in args.prompts:
        path, _, field = source.rpartition(":")
        prompts += read_prompts(path, field, args.limit)
    return prompts


def parse_setting(text: str) -> LookaheadConfig:
    """Settings from [POLICY:]W,N,G or [POLICY:]auto."""
    drafter, _, sizes = text.rpartition(":")
    W, N, G = (None, None, None) if sizes == "auto" else map(int, sizes.split(","))
    return LookaheadConfig(W=W, N=N, G=G, drafter=drafter or "full")


def totals(runs: Sequence[Generation]) -> tuple[float, float]:
    """(S, tokens fed a step and replica) over all runs: new tokens / steps; the mean leaves out the prefills' steps."""
    tokens, steps = sum(run.num_tokens for run in runs), sum(run.steps for run in runs)
    fed = sum(run.step_tokens * (run.steps - 1) for run in runs)
    return tokens / steps, fed / (steps - len(runs))


def machine() -> str:
    """Device and versions, for the line above a table."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.processor() or 'CPU'}"
    return f"{device}, {torch.get_num_threads()} threads, Python {platform.python_version()}, {versions}"


def markdown(header: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
