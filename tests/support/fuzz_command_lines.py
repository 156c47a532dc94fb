"""Malformed command lines, made from a seed, for tests and `benchmarks/correctness.py fuzz`."""

from __future__ import annotations

import random

BAD_INT = (
    "-1000",
    "x",
    "1.5",
    "''",
    "[]",
    "{}",
    "[1]",
    "true",
    "1e400",
    "nan",
    "0x",
    "1,2",
    "-" + "9" * 30,
    "9" * 5000,
)
BAD_SECONDS = ("-1", "0", "x", "''", "[]", "{a:1}", "nan", "inf", "-inf", "true", "1e7", "1,2")
BAD_BOOL = ("x", "''", "[]", "{}", "0.5", "null", "yess", "true,false")
BAD_CHOICE = ("x", "''", "1", "[]", "{}", "[x]", "null", "true", "x" * 5000, "\udcff")
BAD_LIST = ("1", "{a:1}", "[[[x]]]", "[-1]", "[1.5]", "[[]]", "[[-1]]", "[[x]]", "[", "true")
INTS = ("gpus", "strict_tokens", "failure.restarts", "launcher.port", "model.prefill_chunk", "sampling.top_k")
INTS += ("sampling.seed", "sampling.no_repeat_ngram_size", "sampling.min_new_tokens", "max_new_tokens")
INTS += tuple(f"lookahead.{name}" for name in ("W", "N", "G", "budget", "tokens", "draft_tables_bytes", "window_seed"))
SECONDS = ("launcher.timeout", "launcher.start_timeout", "failure.timeout")
BOOLS = ("profile", "model.trust_remote_code", "lookahead.pool_from_prompt")
CHOICES = ("device", "dtype", "exactness", "compile", "policy", "launcher", "launcher.backend", "launcher.placement")
CHOICES += ("model.attn_implementation", "model.packing", "lookahead", "sampling", "model")
CHOICES += ("lookahead.drafter", "lookahead.acceptance", "lookahead.prior")
NUMBERS = {
    "sampling.temperature": ("-1", "1e-9", "x", "nan", "inf", "[]", "true", "''"),
    "sampling.top_p": ("0", "-1", "1.01", "x", "nan", "[]", "true"),
    "sampling.typical_p": ("0", "2", "x"),
    "sampling.min_p": ("-0.1", "1.1", "x", "nan", "{}"),
    "sampling.repetition_penalty": ("0", "-1", "x", "nan", "inf"),
    "sampling.bad_words_ids": BAD_LIST,
    "sampling.logit_bias": ("1", "x", "[]", "{", "{x:1}", "{1:x}", "{-1:1}", "{1:nan}", "{1:2:3}", "{1:[2]}"),
    "launcher.address": ("", "''"),
    "model.path": ("", "/nonexistent", "/dev/null", "/etc"),
}
GRAMMAR = (
    "x",
    "=",
    "=1",
    "a=b",
    "+gpus=1",
    "++gpus=1",
    "~gpus",
    "gpus",
    "gpus==1",
    "gpus=[",
    "gpus={",
    "gpus=}",
    "gpus=(",
)
GRAMMAR += ("gpus=${", "gpus=${x}", "gpus=${gpus}", "gpus=${oc.env:HOME}", "gpus=???", "gpus=range(1,3)", "gpus=1 2")
GRAMMAR += ("gpus=choice(1,2)", "gpus=glob(*)", "gpus=int(x)", "gpus='", 'gpus="', "gpus=\\", "gpus=\n", "gpus=\x00")
GRAMMAR += ("hydra.run.dir=x", "hydra=x", "lookahead@x=7b", "@=1", "größe=1", "\udcff=1", "gpus=\udcff", " gpus=1", "")
GRAMMAR += (
    "lookahead.nonsense=1",
    "lookahead.W.x=1",
    "gpus.x=1",
    "model.=1",
    ".=1",
    "..=",
    "lookahead={W:x}",
    "x" * 9000,
)
GRAMMAR += (
    "gpus=" + "[" * 3000,
    "gpus=" + "[" * 3000 + "]" * 3000,
    "gpus=" + "{a:" * 500 + "1" + "}" * 500,
    "lookahead=7",
)
GENERATE = {
    "prompt": ("",),
    "prompts": ("/nonexistent",),
    "stop": ("", "[", "[1]", '[""]', "[[]]", "[null]", "[" * 5000),
    "num_samples": BAD_INT,
    "limit": BAD_INT,
    "max_time": BAD_SECONDS,
    **dict.fromkeys(("ids", "logprobs", "eos", "compare"), BAD_BOOL),
    "output": ("x",),
    "port": ("80",),
}
SERVE = {
    "server": BAD_CHOICE,
    "port": (*BAD_INT, "65536"),
    "max_waiting": BAD_INT,
    "max_body_bytes": (*BAD_INT, "0"),
    "queue_timeout": BAD_SECONDS,
    "host": ("''", "300.0.0.1", "x..y", "a" * 300, "\udcff", "a b", "\x01", "[1]"),
    "api_key": ("''", "größe", "[]", "{}", "\x01", "\udcff"),
    "served_name": ("''", "[]", "{}"),
    "prompt": ("x",),
}


def override_cases(count: int, seed: int = 0) -> list[tuple[str, list[str]]]:
    """Return (command, arguments) pairs in random order, which must all be refused.

    Args:
        count: number of command lines; each entry of the tables occurs once if `count` allows, the rest are random.
        seed: of the random choices.
    """
    rng = random.Random(seed)
    table = dict.fromkeys(INTS, BAD_INT) | dict.fromkeys(SECONDS, BAD_SECONDS) | dict.fromkeys(BOOLS, BAD_BOOL)
    table |= dict.fromkeys(CHOICES, BAD_CHOICE) | NUMBERS
    cases = []
    for command, start, own in (("lp-generate", ["prompt=x"], GENERATE), ("lp-serve", [], SERVE)):
        cases += [(command, [*start, f"{key}={value}"]) for key, values in (table | own).items() for value in values]
        cases += [(command, [*start, override]) for override in GRAMMAR]
    while len(cases) < count:
        key = rng.choice((*INTS, "".join(rng.choices("abcgpus._@+~/$ ", k=rng.randrange(1, 9)))))
        value = "!" + "".join(rng.choices("abc{}[](),:=$'\"\\ \t\n#%&*;|<>?~é\udc80", k=rng.randrange(12)))
        cases.append(("lp-serve", [f"{key}={value}"]))
    rng.shuffle(cases)
    return cases[:count]
