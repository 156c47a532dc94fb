"""Constrained decoding of small random models, and an independent reference.

The reference decodes one token per step: it masks the logits of transformers' forward pass of the whole text by
xgrammar's matcher.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import regex
import torch
import xgrammar
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import logits_process as library

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.constraints.compiled import CompiledConstraint, compile_constraint, load_compiled
from lp_runtime.constraints.grammar_guide import GrammarGuide, Grammars
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.gumbel import GumbelNoise
from support.small_models import SHAPE, random_model

MERGED = ['{"', '": ', '": "', '", "', '"}', ", ", "ab", "cd", "name", "id", "true", "false", "null", "tags", '"]']
EOS = 63
TEXTS = [*'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-+ \\', *MERGED, "</s>"]
GRAMMARS = [
    'root ::= item (", " item)*\nitem ::= [a-d]{1,3} | "[" item "]"',
    'root ::= "name: " name | "id " [0-9]+\nname ::= "ab" | "cd" name | "null"',
]
REGEXES = ["[ab]{2,6}(cd)*", "id [0-9]{2,5}", "(true|false|null){1,3}", "name [a-z]{1,8}\\.", "-?[0-9]+\\.[0-9]{2}"]
assert len(TEXTS) == SHAPE["vocab_size"]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 64 tokens: characters, and frequent pieces of JSON."""
    words = models.WordLevel({text: token for token, text in enumerate(TEXTS)}, unk_token="</s>")
    tokens = Tokenizer(words)
    tokens.decoder = decoders.Fuse()  # without a decoder, spaces would come between tokens
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")


@functools.cache
def grammars() -> Grammars:
    """Return the factory of guides for the tokenizer's vocabulary."""
    return Grammars(tokenizer, SHAPE["vocab_size"], {EOS})


class WatchedGuide:
    """A guide that reports the nodes whose masks are requested, before it fills them.

    Args:
        guide: fills the masks.
        watch: called with the nodes.
    """

    def __init__(self, guide: GrammarGuide, watch: Callable[[Sequence[int]], None]):
        self._guide, self._watch = guide, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guide, name)

    def masks(self, tokens: np.ndarray, parents: np.ndarray, root: int, nodes: Sequence[int]) -> np.ndarray:
        self._watch(nodes)
        return self._guide.masks(tokens, parents, root, nodes)


@dataclass(frozen=True)
class WatchedGrammars:
    """Makes watched guides; `watch` is the argument of WatchedGuide."""

    grammars: Grammars
    watch: Callable[[Sequence[int]], None]

    def guide(self, constraint: CompiledConstraint, context: Sequence[int]) -> WatchedGuide:
        return WatchedGuide(self.grammars.guide(constraint, context), self.watch)


@functools.cache
def runner(family: str, **settings: Any) -> ModelRunner:
    """Return a random model whose logits are spread widely enough that texts differ."""
    return ModelRunner(random_model(family, seed=1, initializer_range=0.3, **settings), prefill_chunk=16)


@dataclass(frozen=True)
class Draw:
    """A constraint and how its text is decoded.

    Attributes:
        constraint: the settings.
        request: with the compiled constraint.
    """

    constraint: ConstraintConfig
    request: Request


def compile_for_test(constraint: ConstraintConfig) -> CompiledConstraint:
    """Compile a constraint in this process."""
    return compile_constraint(constraint, grammars().vocabulary(False).info)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a JSON schema: a record, an array or, at depth 0, a value."""
    kind = rng.choice(["record", "record", "array"]) if depth else "value"
    if kind == "record":
        names = rng.sample(["name", "id", "tags", "ab", "abc", "zip"], rng.randint(1, 3))
        required = [name for name in names if rng.random() < 0.7]
        properties = {name: random_schema(rng, rng.randrange(depth)) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randrange(2)
        items = random_schema(rng, rng.randrange(depth))
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(1, 3)}
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 6)},
            {"type": "integer", "minimum": 0, "maximum": rng.choice([9, 123])},
            {"type": "boolean"},
            {"enum": ["ab", "abcd", "name", None]},
            {"type": ["null", "boolean"]},
            {"const": "tags of id"},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
        ]
    )


def random_constraint(rng: random.Random) -> ConstraintConfig:
    """Return a constraint of any kind."""
    kind = rng.choice(["json_schema"] * 4 + ["regex", "grammar", "choice"])
    if kind == "json_schema":
        whitespace = rng.choice(["fixed", "fixed", "any"])
        return ConstraintConfig(json_schema=random_schema(rng), whitespace=whitespace)
    if kind == "regex":
        return ConstraintConfig(regex=rng.choice(REGEXES))
    if kind == "grammar":
        return ConstraintConfig(grammar=rng.choice(GRAMMARS))
    return ConstraintConfig(choice=["ab", "abcd", "name of id", "true", "truest"])


def random_draw(rng: random.Random) -> Draw:
    """Return a random constraint and a random request: prompt, settings of drafting and of sampling."""
    constraint = random_constraint(rng)
    auto = rng.random() < 0.2
    lookahead = LookaheadConfig(
        W=None if auto else rng.choice([0, 3, 7, 15]),
        N=None if auto else rng.randint(2, 6),
        G=None if auto else rng.choice([0, 3, 15]),
        drafter="full" if auto else rng.choice(["full", "full", "paper", "prompt_lookup", "recycling"]),
        budget=rng.choice([None, None, 3, 20]),
    )
    sampling = SamplingConfig()
    if rng.random() < 0.6:
        sampling = SamplingConfig(
            temperature=rng.choice([0.5, 1.0, 1.5]),
            top_k=rng.choice([None, 5]),
            top_p=rng.choice([None, 0.8]),
            seed=rng.getrandbits(64),
        )
    sampling.repetition_penalty = rng.choice([None, None, 1.3])
    sampling.logit_bias = rng.choice([None, None, {0: 3.0, 40: -2.0}])
    sampling.min_new_tokens = rng.choice([None, None, 6])
    request = Request(
        prompt_ids=tuple(rng.randrange(EOS) for _ in range(rng.randint(1, 20))),
        lookahead=lookahead,
        max_new_tokens=rng.choice([12, 60]),
        eos_token_ids=frozenset({EOS}),
        sampling=sampling,
        sample=rng.randrange(3),
        logprobs=rng.random() < 0.3,
        constraint=compile_for_test(constraint),
    )
    return Draw(constraint, request)


def decode(
    model: ModelRunner, request: Request, group: Group, factory: Grammars | None = None
) -> tuple[list[int], int, str]:
    """Decode a request as one replica of a group; return (new tokens, steps, why decoding ended)."""
    factory = factory or grammars()
    engine = Engine(model, group, Calibration(model, group, cache_dir=None), grammars=factory)
    *outputs, report = engine.run(request)
    return [token for output in outputs for token in output.token_ids], report.num_steps, report.finish_reason


def reference(model: PreTrainedModel, draw: Draw) -> list[int]:
    """Return the new tokens of decoding one token per step; only the noise comes from this package."""
    info = grammars().vocabulary(False).info
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    constraint, source = draw.constraint, draw.constraint.source
    if constraint.kind == "json_schema":
        grammar = compiler.compile_json_schema(source, any_whitespace=constraint.whitespace == "any")
    elif constraint.kind == "regex":
        grammar = compiler.compile_regex(source)
    elif constraint.kind == "grammar":
        grammar = compiler.compile_grammar(source)
    else:
        grammar = compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, constraint.choice)))
    return _masked(model, draw.request, grammar, info.vocab_size)


def masked_decoding(
    model: PreTrainedModel, request: Request, factory: Grammars, expected: Sequence[int] = ()
) -> list[int]:
    """Return the new tokens of decoding one token per step under the compiled grammar of a request.

    While the tokens equal `expected`, their logits come from one pass, which is faster.
    """
    assert request.constraint is not None
    info = factory.vocabulary(request.constraint.has_special_tokens).info
    return _masked(model, request, load_compiled(request.constraint, info), info.vocab_size, expected)


@torch.no_grad()
def _masked(
    model: PreTrainedModel, request: Request, grammar: Any, vocabulary_size: int, expected: Sequence[int] = ()
) -> list[int]:
    """Decode one token per step with masks of xgrammar's matcher."""
    whole = [*request.prompt_ids, *expected]
    known = model(torch.tensor([whole])).logits[0].float() if expected else None
    matcher, sampling = xgrammar.GrammarMatcher(grammar), request.sampling
    before, warpers = _processors(request)
    noise = None
    if sampling.temperature is not None:
        noise = GumbelNoise(sampling.seed, request.sample, vocabulary_size, torch.device("cpu"))
    ids = list(request.prompt_ids)
    mask = xgrammar.allocate_token_bitmask(1, vocabulary_size)
    for _ in range(request.max_new_tokens):
        prefix = torch.tensor([ids])
        if known is not None and ids == whole[: len(ids)]:
            scores = known[len(ids) - 1 : len(ids)].clone()
        else:
            scores = model(prefix, attention_mask=torch.ones_like(prefix)).logits[:, -1].float()
        for processor in before:
            scores = processor(prefix, scores)
        matcher.fill_next_token_bitmask(mask)
        xgrammar.apply_token_bitmask_inplace(scores, mask)
        if (scores == -torch.inf).all():  # min_new_tokens forbids the only token that the grammar allows
            scores = torch.zeros_like(scores)
            xgrammar.apply_token_bitmask_inplace(scores, mask)
        for warper in warpers:
            scores = warper(prefix, scores)
        if noise is not None:
            scores = scores + noise.at([len(ids)])
        ids.append(int(scores.argmax()))
        assert matcher.accept_token(ids[-1])
        if ids[-1] in request.eos_token_ids:
            break
    return ids[len(request.prompt_ids) :]


def _processors(request: Request) -> tuple[list, list]:
    """Return transformers' own processors of a request: those before the mask, and the warpers after it."""
    sampling, before, warpers = request.sampling, [], []
    if sampling.logit_bias:
        biases = {(token,): float(bias) for token, bias in sampling.logit_bias.items()}
        before.append(library.SequenceBiasLogitsProcessor(biases))
    if sampling.repetition_penalty:
        before.append(library.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens:
        length = len(request.prompt_ids)
        before.append(library.MinNewTokensLengthLogitsProcessor(length, sampling.min_new_tokens, [EOS]))
    if sampling.temperature is not None:
        warpers.append(library.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(library.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p:
            warpers.append(library.TopPLogitsWarper(sampling.top_p))
    return before, warpers


def is_valid(constraint: ConstraintConfig, tokens: list[int]) -> bool:
    """Whether a finished text satisfies its constraint, checked without xgrammar."""
    text = "".join(TEXTS[token] for token in tokens if token != EOS)
    if constraint.kind == "json_schema":
        return jsonschema.Draft202012Validator(constraint.json_schema).is_valid(json.loads(text))
    if constraint.kind == "regex":
        return regex.fullmatch(constraint.regex, text) is not None
    if constraint.kind == "choice":
        return text in constraint.choice
    patterns = ["(?P<i>[a-d]{1,3}|\\[(?&i)\\])(, (?&i))*", "name: (cd)*(ab|null)|id [0-9]+"]
    return regex.fullmatch(patterns[GRAMMARS.index(constraint.grammar)], text) is not None
