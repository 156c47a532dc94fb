"""One prompt on the terminal: text as it comes, then a summary."""

from __future__ import annotations

import json
import sys

from lp_runtime.api import Generation, LookaheadRuntime
from lp_runtime.config import PLAIN, GenerateConfig, LookaheadConfig
from lp_runtime.errors import ConfigError


def generate_one(runtime: LookaheadRuntime, config: GenerateConfig, prompt: str | list[int]) -> None:
    """Stream a prompt's continuation to stdout and a summary to stderr; with compare=true, once more plainly.

    Without a tokenizer, which a prompt of ids can do without, the new token ids are printed.
    """
    generation = _stream(runtime, config, prompt, config.lookahead)
    rows = [("lookahead", generation)]
    if config.compare:
        print("\n--- the same prompt, one token a step:", file=sys.stderr)
        rows.append(("one token a step", _stream(runtime, config, prompt, PLAIN, echo=False)))
    print(summary(runtime, config.lookahead, rows), file=sys.stderr)


def parse_ids(value: object, name: str) -> list[int]:
    """Token ids from a JSON list, or its text.

    Raises:
        ConfigError: if it is anything else; `name` says where it stood.
    """
    try:
        ids = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{name}={json.dumps(value)[:40]}: with ids=true it must be a JSON list of token ids")
    return ids


def _stream(
    runtime: LookaheadRuntime, config: GenerateConfig, prompt: str | list[int], lookahead: LookaheadConfig, echo=True
) -> Generation:
    stream = runtime.stream(prompt, config.max_new_tokens, eos=config.eos, lookahead=lookahead)
    if echo and not config.ids:
        print(prompt, end="", flush=True)  # now that the request is known to be good
    for piece in stream:
        if echo:
            text = piece.text if stream.has_text else "".join(f"{token} " for token in piece.token_ids)
            print(text, end="", flush=True)
    if echo:
        print(flush=True)
    return stream.generation


def summary(runtime: LookaheadRuntime, lookahead: LookaheadConfig, rows: list[tuple[str, Generation]]) -> str:
    """The runs as a table, with the setting above."""
    info = runtime.info
    lines = [
        f"\n{runtime.num_replicas} replica{'s' * (runtime.num_replicas > 1)} on {info.device.split(':')[0]},"
        f" {info.dtype}, W={lookahead.W} N={lookahead.N} G={lookahead.G}",
        f"{'':18}{'tokens':>8}{'steps':>8}{'compression ratio':>20}{'tokens fed a step':>20}"
        f"{'seconds':>10}{'tokens/s':>10}",
    ]
    for name, run in rows:
        lines.append(
            f"{name:18}{run.num_tokens:8}{run.steps:8}{run.compression_ratio:20.2f}{run.step_tokens:20.1f}"
            f"{run.seconds:10.2f}{run.tokens_per_second:10.1f}"
        )
    pool = rows[0][1].pool
    lines.append(
        f"pool: {pool.num_ngrams} n-grams of {pool.num_keys} first tokens ({pool.fan_out:.1f} each); guesses in"
        f" {pool.hit_rate:.0%} of the steps, {pool.accepted_length:.1f} of their tokens accepted a step"
    )
    if len(rows) == 2:
        same = rows[0][1].token_ids == rows[1][1].token_ids
        lines.append(f"the same tokens: {'yes' if same else 'NO'}")
    return "\n".join(lines)
