"""Measures steps that a grammar saves: S on 40 JSON schemas, with and without drafting forced tokens.

    python benchmarks/correctness.py forced                            # the demo model
    python benchmarks/correctness.py forced --model DIR --max-new-tokens 120

Schemas are of two kinds: small records of three to six values, and nested arrays of records. Every schema is decoded
greedily in three ways: one token per step, W=15 N=5 G=15 without forced tokens, and the same with them. S = new tokens
/ steps; `forced` is the share of the new tokens that come from accepted forced drafts. The exit status is 1 if any two
texts differ, or if a text that has ended does not satisfy its schema.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import jsonschema
import torch
from common import GREEDY, Results, tokens_and_report

from lp_runtime import ConstraintConfig, LookaheadConfig
from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import ModelConfig
from lp_runtime.constraints.compiled import compile_constraint
from lp_runtime.constraints.grammar_guide import GrammarGuide, Grammars
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.lookahead.guide import Examined
from lp_runtime.model.loading.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

VALUES: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 16},
    {"type": "integer", "minimum": 0, "maximum": 9999},
    {"type": "boolean"},
    {"enum": ["small", "medium", "large"]},
    {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
]
NAMES = ["name", "city", "age", "street", "product", "price", "quantity", "created_at", "status", "email", "title"]
KINDS = ("small records", "nested arrays")


class Unforced(GrammarGuide):
    """Guide that masks and prunes, but drafts no forced tokens."""

    def forced(self, max_tokens: int) -> list[int]:
        return []

    def examine(self, *args: Any) -> Examined:
        return super().examine(*args)._replace(forced=[])


class UnforcedGrammars(Grammars):
    """Grammars that make `Unforced` guides."""

    def guide(self, *args: Any) -> GrammarGuide:
        guide = super().guide(*args)
        guide.__class__ = Unforced  # both classes have the same attributes
        return guide


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--model", help="directory; the demo model if not given")
    parser.add_argument("--schemas", type=int, default=40, help="number of schemas, half of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)


def record(rng: random.Random, num: int) -> dict[str, Any]:
    """Return the schema of a record with `num` values."""
    properties = {name: rng.choice(VALUES) for name in rng.sample(NAMES, num)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def schema_of(kind: str, rng: random.Random) -> dict[str, Any]:
    """Return a schema of a kind."""
    if kind == "small records":
        return record(rng, rng.randint(3, 6))
    item = record(rng, rng.randint(2, 3))
    rows = {"type": "array", "items": item, "minItems": 2, "maxItems": 3}
    properties = {"title": VALUES[0], "rows": rows}
    return {"type": "object", "properties": properties, "required": ["title", "rows"], "additionalProperties": False}


def run(args: argparse.Namespace) -> int:
    """Decode every schema in three ways; return 1 if any text differs or does not satisfy its schema."""
    torch.set_num_threads(1)
    config = ModelConfig(path=args.model)
    tokenizer = load_tokenizer(config)
    model = load_model(config, torch.device("cpu"), "float32")
    runner, ends = ModelRunner(model, ModelConfig.prefill_chunk), eos_token_ids(model)
    made = [kind(lambda: tokenizer, runner.vocabulary_size, ends) for kind in (Grammars, UnforcedGrammars)]
    calibration = Calibration(runner, Group.alone(), cache_dir=None)
    with_forced, without = (Engine(runner, Group.alone(), calibration, grammars=each) for each in made)
    fixed = LookaheadConfig(15, 5, 15, prior="none")
    rng, num_wrong = random.Random(args.seed), 0
    results = Results("forced", args.output)
    for kind in KINDS:
        tokens, steps, forced, num_ended = 0, [0, 0, 0], 0, 0
        for _ in range(args.schemas // 2):
            schema = schema_of(kind, rng)
            compiled = compile_constraint(ConstraintConfig(json_schema=schema), made[0].vocabulary(False).info)
            prompt = tokenizer(f"JSON with {', '.join(schema['properties'])}:\n").input_ids
            texts = []
            for place, (engine, lookahead) in enumerate(((with_forced, PLAIN), (without, fixed), (with_forced, fixed))):
                request = Request(
                    tuple(prompt), lookahead, args.max_new_tokens, frozenset(ends), sampling=GREEDY, constraint=compiled
                )
                token_ids, report = tokens_and_report(engine.run(request))
                texts.append(token_ids)
                steps[place] += report.num_steps
            tokens += len(texts[0])
            forced += sum(report.counts.accepted[report.counts.sources.index("forced")])
            num_wrong += texts[0] != texts[1] or texts[0] != texts[2]
            if report.finish_reason == "eos":
                num_ended += 1
                text = str(tokenizer.decode(texts[0], skip_special_tokens=True))
                num_wrong += not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        names = ("S one token a step", "S unforced", "S forced")
        row = {"kind": kind, "schemas": args.schemas // 2, "new tokens": tokens, "ended": num_ended}
        row |= {name: tokens / each for name, each in zip(names, steps, strict=True)}
        results.add(row | {"forced": forced / tokens})
    results.finish(f"{args.model or 'demo model'}, greedy, W=15 N=5 G=15, {num_wrong} wrong")
    return 1 if num_wrong else 0
