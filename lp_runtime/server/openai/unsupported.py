"""Fields of other servers that are refused, because they would change an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lp_runtime.errors import RequestError

# The fields, and the values of each that ask for the default behavior.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "json_schema": (),
    "format": ("",),
    "grammar": ("",),
    "ebnf": (),
    "regex": (),
    "structural_tag": (),
    "n_predict": (-1,),
    "prompt_logprobs": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "return_tokens_as_token_ids": (False,),
    "chat_template": (),
    "documents": ([],),
    "typical_p": (1.0,),
}
# What to use in place of some of them.
REMEDIES = {
    **{f"guided_{kind}": f'structured_outputs={{"{kind}": ...}}' for kind in ("json", "regex", "grammar", "choice")},
    **{name: f'structured_outputs={{"{name}": ...}}' for name in ("grammar", "regex", "structural_tag")},
    "json_schema": 'structured_outputs={"json": ...}',
    "format": 'structured_outputs={"json": ...} or {"json_object": true}',
    "ebnf": 'structured_outputs={"grammar": ...}',
    "n_predict": "max_tokens",
    "prompt_logprobs": "echo=true with logprobs",
}


def check_supported(fields: Mapping[str, object]) -> list[str]:
    """Refuse fields that ask for something that is not supported; return the names of those that are unknown."""
    for name, value in fields.items():
        if name in UNSUPPORTED and not any(_same(value, each) for each in UNSUPPORTED[name]):
            values = " or ".join(json.dumps(each) for each in UNSUPPORTED[name])
            remedy = f"use {REMEDIES[name]}" if name in REMEDIES else values and f"leave it out or give {values}"
            raise RequestError(f"{name}: is not supported{remedy and f'; {remedy}'}")
    return [name for name in fields if name not in UNSUPPORTED]


def _same(value: object, other: object) -> bool:
    """Whether two JSON values are equal; unlike in Python, true differs from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
