"""Checks JSON schemas with characters of all Unicode planes in every path that takes a schema.

    python benchmarks/correctness.py schemas --schemas 300

Random schemas are decoded with the demo model's vocabulary through formats, tools and structural tags, greedily or
sampled, by 1 to 3 replicas. The exit status is 1 if a text differs from that of masked decoding of one token per step,
or does not satisfy its schema by jsonschema.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import torch
from common import Results
from support.constrained import decode, masked_decoding
from support.random_schemas import PATHS, random_schema, texts_of
from support.ranks import run_ranks
from support.small_models import random_model

from lp_runtime import LookaheadConfig, SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.constraints.compiled import compile_constraint
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.distributed.transport.group import Group
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

NUM_REPLICAS = (1, 1, 2, 3)  # one is chosen at random per request
# Added to the logits of tokens that end a value, and of white space, so that texts of a random model end.
CLOSING_BIAS, WHITESPACE_BIAS = 20.0, -10.0
BATCH = 15  # schemas whose requests are sent to replicas together


@dataclass(frozen=True)
class Case:
    """A request under a schema.

    Attributes:
        path: name of the schema's path, one of PATHS.
    """

    schema: dict[str, Any]
    path: str
    num_replicas: int
    request: Request


@functools.cache
def grammars() -> Grammars:
    """Return the guides' factory for the demo model's vocabulary."""
    tokenizer = load_tokenizer(ModelConfig(path=None))
    return Grammars(lambda: tokenizer, len(tokenizer), {tokenizer.eos_token_id})


@functools.cache
def runner() -> ModelRunner:
    """Return a small random model with the vocabulary of `grammars`."""
    size = grammars().vocabulary(True).size
    model = random_model(
        "Llama", seed=1, initializer_range=0.3, vocab_size=size, max_position_embeddings=512, num_hidden_layers=1
    )
    return ModelRunner(model, prefill_chunk=16)


def cases(seed: int, numbers: Sequence[int], max_new_tokens: int) -> Iterator[Case]:
    """Yield the cases of some schemas: each in every path, greedily or sampled."""
    end = load_tokenizer(ModelConfig(path=None)).eos_token_id
    texts = texts_of(grammars().vocabulary(False))
    biases = {token: WHITESPACE_BIAS for token, text in enumerate(texts) if text.isspace()}
    biases |= {token: CLOSING_BIAS for token, text in enumerate(texts) if text[:1] == b'"' or token == end}
    biases |= {token: CLOSING_BIAS / 4 for token, text in enumerate(texts) if text in (b"}", b"]")}
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        schema = random_schema(rng)
        for place, name in enumerate(PATHS):
            constraint = PATHS[name](schema).constraint
            vocabulary = grammars().vocabulary(constraint.kind == "structural_tag")
            compiled = compile_constraint(constraint, vocabulary.info)
            sampling = SamplingConfig(logit_bias=biases)
            if (number + place) % 2:
                sampling.temperature, sampling.seed = 1.0, rng.getrandbits(64)
            request = Request(
                prompt_ids=tuple(rng.randrange(1, vocabulary.size) for _ in range(rng.randint(1, 9))),
                lookahead=_random_lookahead(rng),
                max_new_tokens=max_new_tokens,
                eos_token_ids=frozenset({end}),
                sampling=sampling,
                constraint=compiled,
            )
            yield Case(schema, name, rng.choice(NUM_REPLICAS), request)


def _random_lookahead(rng: random.Random) -> LookaheadConfig:
    sizes: dict[str, Any] = {"W": rng.choice([0, 3, 7]), "N": rng.randint(2, 6), "G": rng.choice([0, 3, 7])}
    return LookaheadConfig(**sizes, drafter=rng.choice(["full", "full", "paper", "prompt_lookup"]), prior="none")


def decode_all(group: Group, requests: Sequence[Request]) -> list[tuple[list[int], int, str]]:
    """Decode requests in turn, as one replica of a group."""
    return [decode(runner(), request, group, grammars()) for request in requests]


def compare(batch: Sequence[Case], num_replicas: int) -> Counter[str]:
    """Decode cases on a number of replicas; return counts, including those of errors."""
    counts: Counter[str] = Counter(cases=len(batch))
    requests = [case.request for case in batch]
    ranks = run_ranks(decode_all, num_replicas, requests) if num_replicas > 1 else [decode_all(Group.alone(), requests)]
    for rank in ranks:
        if isinstance(rank, Exception):
            raise rank
    for place, case in enumerate(batch):
        tokens, steps, reason = ranks[0][place]
        counts.update(tokens=len(tokens), steps=steps, sampled=case.request.sampling.seed is not None)
        expected = masked_decoding(runner().model, case.request, grammars(), tokens)
        if any(rank[place][0] != expected for rank in ranks):
            counts["mismatches"] += 1
            print("mismatch:", case, file=sys.stderr)
        if reason == "eos":
            counts["ended"] += 1
            if (problem := _problem(case, tokens)) is not None:
                counts["invalid"] += 1
                print("invalid:", case.path, case.schema, problem, file=sys.stderr)
    return counts


def _problem(case: Case, tokens: Sequence[int]) -> str | None:
    """Return why a text that has ended does not satisfy its schema; None if it does."""
    path = PATHS[case.path](case.schema)
    texts = texts_of(grammars().vocabulary(path.constraint.kind == "structural_tag"))
    content = b"".join(texts[token] for token in tokens if token not in case.request.eos_token_ids)
    try:
        values = path._replace(prefix="").values(content.decode(errors="replace"))
        for value in values:
            jsonschema.Draft202012Validator(case.schema).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{content!r}: {error}"
    return None if values else f"{content!r}: no JSON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Decode every schema through all paths; return 1 after a mismatch or an invalid text."""
    torch.set_num_threads(1)
    counts = {num_replicas: Counter[str]() for num_replicas in sorted(set(NUM_REPLICAS))}
    for start in range(0, args.schemas, BATCH):
        numbers = range(start, min(start + BATCH, args.schemas))
        batch = list(cases(args.seed, numbers, args.max_new_tokens))
        for num_replicas in counts:
            counts[num_replicas] += compare([each for each in batch if each.num_replicas == num_replicas], num_replicas)
        done = sum(each["cases"] for each in counts.values())
        num_wrong = sum(each["mismatches"] + each["invalid"] for each in counts.values())
        print(f"{numbers.stop} schemas, {done} texts, {num_wrong} wrong", file=sys.stderr, flush=True)
    results = Results("schemas", args.output)
    for num_replicas, each in counts.items():
        row: dict[str, str | int | float] = {"replicas": num_replicas}
        row |= {name: each[name] for name in ("cases", "sampled", "mismatches", "ended", "invalid")}
        results.add(row | {"S": each["tokens"] / max(each["steps"], 1)})
    results.finish(f"{args.schemas} random schemas through {len(PATHS)} paths, seed {args.seed}")
    return 1 if any(each["mismatches"] + each["invalid"] for each in counts.values()) else 0
