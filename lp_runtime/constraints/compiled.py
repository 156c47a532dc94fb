"""Compilation of constraints with xgrammar, which refuses those that no text can satisfy."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.exact_grammars import exact_ebnf
from lp_runtime.constraints.exact_numbers import with_numbers
from lp_runtime.constraints.exact_regexes import exact_regex, regex_may_begin_with_space
from lp_runtime.constraints.exact_schemas import exact_schema, json_grammar
from lp_runtime.constraints.grammar_checks import GrammarParts
from lp_runtime.constraints.library import library
from lp_runtime.constraints.structural_tags import structural_tag_grammar
from lp_runtime.errors import ConfigError, ConstraintError, first_line
from lp_runtime.text.token_text import TokenTexts

MAX_EXAMINED_CHARS = 1000  # of a regex; a longer one takes long
MAX_COMPILED_BYTES = 1 << 26  # of a grammar that is sent to replicas, before compression
AFTER_REASONING = r"[ \n\t]{0,8}"
COMPRESSION_LEVEL = 1  # for zlib: reduces grammars to about a seventh within a millisecond


@dataclass(frozen=True)
class CompiledConstraint:
    """A serialized compiled grammar, which is sent to replicas with a request."""

    key: str  # identifies the constraint; part of the digest of the request's state
    data: bytes  # xgrammar's JSON serialization, compressed with zlib
    has_special_tokens: bool = False  # whether the text may contain some, as in formats of tool calls


def describe_vocabulary(
    token_texts: TokenTexts, vocabulary_size: int, eos_token_ids: Collection[int], with_special_tokens: bool
) -> Any:
    """Return xgrammar's TokenizerInfo of a model: the bytes that each token adds to a text.

    `vocabulary_size` is the model's, which may exceed the tokenizer's; `eos_token_ids` are at least one.
    `with_special_tokens`: whether special tokens match their text in a grammar; if not, they are never allowed.
    """
    xgrammar = library()
    texts = token_texts.all_bytes(vocabulary_size)
    plain = [b"" if token in token_texts.special_ids else text for token, text in enumerate(texts)]
    if (pair := token_texts.changed_pair(plain)) is not None:
        raise ConfigError(
            f"constraints do not work with this model: the text of its tokenizer's token {pair[1]} depends on"
            f" the token before it, for example {pair[0]}"
        )
    return xgrammar.TokenizerInfo(
        texts if with_special_tokens else plain,
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary_size,
        stop_token_ids=sorted(eos_token_ids),
    )


def compile_constraint(config: ConstraintConfig, info: Any) -> CompiledConstraint:
    """Compile a constraint in this process, with no limit on time or memory; see ConstraintCompiler.

    The kind of `config` must not be None; `info` is xgrammar's TokenizerInfo. xgrammar may crash the process.
    """
    kind = config.kind
    xgrammar = library()
    try:
        grammar = _grammar(config)
        if kind in ("json_schema", "structural_tag"):
            grammar = with_numbers(grammar)
        if (dead_end := GrammarParts(grammar).dead_end()) is not None:
            raise ConstraintError(f"constraint.{kind}: {dead_end}")
        # With its cache, xgrammar prints and reads the grammar first, which changes U+0080 to U+00FF.
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled = compiler.compile_grammar(grammar)
    except ConstraintError:
        raise
    except Exception as error:  # xgrammar documents no error classes
        raise ConstraintError(f"constraint.{kind}: {_reason(error)}") from error
    matcher = xgrammar.GrammarMatcher(compiled)
    masks = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    matcher.fill_next_token_bitmask(masks)
    if not masks.any():
        raise ConstraintError(
            f"constraint.{kind}: no token of the model's vocabulary can begin a text that satisfies it"
        )
    forced_bytes(matcher)  # its time is unbounded too: find out here, not on a replica
    data = compiled.serialize_json().encode()
    if len(data) > MAX_COMPILED_BYTES:
        raise ConstraintError(
            f"constraint.{kind}: its grammar has {len(data)} bytes; must be at most {MAX_COMPILED_BYTES}"
        )
    return CompiledConstraint(config.key, zlib.compress(data, COMPRESSION_LEVEL), kind == "structural_tag")


def forced_bytes(matcher: Any) -> bytes:
    """Return the bytes that must follow at the matcher's state; they may begin or end within a character.

    xgrammar decodes them as UTF-8; if that fails, they are taken from the error.
    """
    try:
        return matcher.find_jump_forward_string().encode()
    except UnicodeDecodeError as error:
        return error.object


def load_compiled(constraint: CompiledConstraint, info: Any) -> Any:
    """Deserialize a compiled grammar; `info` must describe the same vocabulary as at compilation."""
    return library().CompiledGrammar.deserialize_json(zlib.decompress(constraint.data).decode(), info)


def _grammar(config: ConstraintConfig) -> Any:
    Grammar, kind, source = library().Grammar, config.kind, config.source
    if kind == "json_schema":
        grammar = json_grammar(exact_schema(json.loads(source)), config.whitespace == "any")
    elif kind == "regex":
        grammar = Grammar.from_regex(exact_regex(source))
    elif kind == "grammar":
        grammar = Grammar.from_ebnf(exact_ebnf(source))
    elif kind == "choice":
        texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source)]
        grammar = Grammar.from_ebnf(f"root ::= {' | '.join(texts)}")
    else:
        grammar = structural_tag_grammar(json.loads(source), config.whitespace == "fixed")
    if config.reasoning_end is None:
        return grammar
    begin, end = config.reasoning_begin or "", config.reasoning_end
    free = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
    space = {"type": "regex", "pattern": AFTER_REASONING}
    reasoning: dict[str, Any] = {
        "type": "sequence",
        "elements": [free] if may_begin_with_space(config) else [free, space],
    }
    if begin:
        reasoning = {"type": "optional", "content": reasoning}
    return Grammar.concat(Grammar.from_structural_tag({"type": "structural_tag", "format": reasoning}), grammar)


def may_begin_with_space(config: ConstraintConfig) -> bool:
    """Whether constrained text may begin with white space, so that all of it after a free part belongs to the text.

    Of JSON it never does. A grammar, a structural tag or a long regex is taken for one whose texts may.
    """
    if config.kind == "regex":
        try:
            return len(config.source) > MAX_EXAMINED_CHARS or regex_may_begin_with_space(config.source)
        except ValueError:  # it is refused when it is compiled
            return False
    return config.kind in ("grammar", "structural_tag") or any(text[:1].isspace() for text in config.choice or ())


def _reason(error: Exception) -> str:
    """Return the message of an xgrammar error, without time stamp and source location."""
    reason = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", first_line(error))
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", reason)
