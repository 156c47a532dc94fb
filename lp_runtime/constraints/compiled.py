"""Compiling constraints with xgrammar, and refusing those that no text can end."""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.grammar_checks import check_dead_ends
from lp_runtime.constraints.schema_checks import check_schema
from lp_runtime.errors import ConfigError, ConstraintError, first_line

MAX_COMPILED_BYTES = 1 << 26  # of a grammar that is sent to replicas, before compression
COMPRESSION_LEVEL = 1  # of zlib: a seventh of the bytes within a millisecond


@dataclass(frozen=True)
class CompiledConstraint:
    """A compiled grammar, as it travels to replicas with a request.

    Attributes:
        key: tells the constraint from others: part of the digest of the request's state.
        data: xgrammar's serialisation, compressed.
        has_special_tokens: whether special tokens may stand in the text, as in formats of tool calls.
    """

    key: str
    data: bytes
    has_special_tokens: bool = False


@functools.cache
def library() -> ModuleType:
    """Return the package xgrammar.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        message = "constraints need the package xgrammar: pip install 'lp-runtime[constraints]'"
        raise ConfigError(message) from error
    return xgrammar


def describe_vocabulary(
    tokenizer: Any, vocabulary_size: int, eos_token_ids: Collection[int], with_special_tokens: bool
) -> Any:
    """Return xgrammar's TokenizerInfo of a model.

    Args:
        tokenizer: the model's.
        vocabulary_size: the model's, which may be larger than the tokenizer's.
        eos_token_ids: tokens that end a text, at least one.
        with_special_tokens: whether special tokens count as the text that they are written as; if not, they are never
            allowed.

    Raises:
        ConfigError: xgrammar is not installed, or does not support the tokenizer.
    """
    xgrammar = library()
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary_size, stop_token_ids=sorted(eos_token_ids)
        )
    except Exception as error:  # of a foreign library
        raise ConfigError(
            f"constraints need another tokenizer than one of class {type(tokenizer).__name__}, which xgrammar does not"
            f" support: {_reason(error)}"
        ) from error
    if with_special_tokens:
        return info
    texts = list(info.decoded_vocab)
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special and token < len(texts):
            texts[token] = b""
    return xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary_size,
        stop_token_ids=sorted(eos_token_ids),
        add_prefix_space=info.add_prefix_space,
    )


def compile_constraint(config: ConstraintConfig, info: Any) -> CompiledConstraint:
    """Compile a constraint; may take any time and memory, and may end the process: see `CompileProcess`.

    Args:
        config: the constraint, of some kind.
        info: xgrammar's TokenizerInfo.

    Raises:
        ConstraintError: the constraint is invalid, no text can satisfy it, or it is too large.
    """
    kind = config.kind
    xgrammar = library()
    try:
        grammar = _grammar(config)
        check_dead_ends(kind, grammar)
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled = compiler.compile_grammar(grammar)
    except ConstraintError:
        raise
    except Exception as error:  # of a foreign library
        raise ConstraintError(f"constraint.{kind}: {_reason(error)}") from error
    matcher = xgrammar.GrammarMatcher(compiled)
    masks = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    matcher.fill_next_token_bitmask(masks)
    if not masks.any():
        raise ConstraintError(
            f"constraint.{kind}: no token of the model's vocabulary can begin a text that satisfies it"
        )
    forced_bytes(matcher)  # may take any time, too
    data = compiled.serialize_json().encode()
    if len(data) > MAX_COMPILED_BYTES:
        raise ConstraintError(
            f"constraint.{kind}: its grammar has {len(data)} bytes; must be at most {MAX_COMPILED_BYTES}"
        )
    return CompiledConstraint(config.key, zlib.compress(data, COMPRESSION_LEVEL), kind == "structural_tag")


def forced_bytes(matcher: Any) -> bytes:
    """Return what must follow where an xgrammar matcher stands; may begin or end within a character.

    The library makes a str of these bytes, and raises where they are none.
    """
    try:
        return matcher.find_jump_forward_string().encode()
    except UnicodeDecodeError as error:
        return error.object


def load_compiled(constraint: CompiledConstraint, info: Any) -> Any:
    """Return xgrammar's CompiledGrammar of what was compiled elsewhere for the same vocabulary."""
    return library().CompiledGrammar.deserialize_json(zlib.decompress(constraint.data).decode(), info)


def _grammar(config: ConstraintConfig) -> Any:
    """Return a constraint as a grammar of xgrammar's."""
    Grammar, kind, source = library().Grammar, config.kind, config.source
    if kind == "json_schema":
        check_schema(json.loads(source))
        is_any = config.whitespace == "any"
        grammar = Grammar.from_json_schema(source, any_whitespace=is_any, strict_mode=True)
    elif kind == "regex":
        grammar = Grammar.from_regex(source)
    elif kind == "grammar":
        grammar = Grammar.from_ebnf(source)
    elif kind == "choice":
        texts = " | ".join(_quoted(text) for text in json.loads(source))
        grammar = Grammar.from_ebnf(f"root ::= {texts}")
    else:
        grammar = Grammar.from_structural_tag(_with_checked_schemas(json.loads(source), config.whitespace == "fixed"))
    if config.reasoning_end is None:
        return grammar
    begin, end = config.reasoning_begin or "", config.reasoning_end
    free: dict[str, Any] = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
    if begin:
        free = {"type": "optional", "content": free}
    before = Grammar.from_structural_tag({"type": "structural_tag", "format": free})
    return Grammar.concat(before, Grammar.from_ebnf("root ::= [ \\n\\t]{0,8}"), grammar)


def _with_checked_schemas(value: Any, is_fixed: bool) -> Any:
    """Return a structural tag, or a part of one, once its JSON schemas are checked.

    Args:
        value: the tag, as JSON.
        is_fixed: whether JSON schemas become grammars of fixed whitespace.

    Raises:
        ConstraintError: a grammar cannot hold one of the schemas.
    """
    if isinstance(value, list):
        return [_with_checked_schemas(each, is_fixed) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and value.get("style", "json") == "json" and "json_schema" in value:
        check_schema(value["json_schema"])
        if not is_fixed:
            return value
        grammar = library().Grammar.from_json_schema(json.dumps(value["json_schema"]), any_whitespace=False)
        return {"type": "grammar", "grammar": str(grammar)}
    return {name: _with_checked_schemas(each, is_fixed) for name, each in value.items()}


def _quoted(text: str) -> str:
    """Return a text as a literal of an EBNF grammar."""
    return json.dumps(text, ensure_ascii=False)


def _reason(error: Exception) -> str:
    """Return the reason of an error of xgrammar's, without the place in its own source."""
    reason = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", first_line(error))
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", reason)
