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
    "add_special_tokens": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "system": ("", []),
    "instructions": ("",),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "guided_whitespace_pattern": (),
    "repetition_detection": (),
    "logprob_token_ids": (),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_hidden_states": (False,),
    "prompt_embeds": (),
    "watermarking": (False,),
    "vllm_xargs": ({},),
    "custom_params": ({},),
    "custom_logit_processor": (),
    "lora_path": (),
    "stop_sequences": ([],),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "repeat_penalty": (1.0,),
    "mirostat": (0,),
    "dry_multiplier": (0.0,),
    "xtc_probability": (0.0,),
    "top_n_sigma": (-1.0,),
    "dynatemp_range": (0.0,),
    "max_new_tokens": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
}
LENGTHS = ("n_predict", "max_new_tokens", "max_completion_tokens", "max_output_tokens")
# What to use in place of some of them.
REMEDIES = {
    **{f"guided_{kind}": f'structured_outputs={{"{kind}": ...}}' for kind in ("json", "regex", "grammar", "choice")},
    **{name: f'structured_outputs={{"{name}": ...}}' for name in ("grammar", "regex", "structural_tag")},
    "json_schema": 'structured_outputs={"json": ...}',
    "format": 'structured_outputs={"json": ...} or {"json_object": true}',
    "ebnf": 'structured_outputs={"grammar": ...}',
    "prompt_logprobs": "echo=true with logprobs",
    "system": 'a message with role "system"',
    "instructions": 'a message with role "system"',
    "stop_sequences": "stop",
    "no_stop_trim": "include_stop_str_in_output",
    "repeat_penalty": "repetition_penalty",
}


def check_supported(fields: Mapping[str, object], length_field: str) -> list[str]:
    """Refuse fields that ask for something that is not supported; return the names of those that are unknown.

    `length_field` is the body's field of the number of new tokens.
    """
    remedies = REMEDIES | dict.fromkeys(LENGTHS, length_field)
    for name, value in fields.items():
        if name in UNSUPPORTED and not any(_same(value, each) for each in UNSUPPORTED[name]):
            values = " or ".join(json.dumps(each) for each in UNSUPPORTED[name])
            remedy = f"use {remedies[name]}" if name in remedies else values and f"leave it out or give {values}"
            raise RequestError(f"{name}: is not supported{remedy and f'; {remedy}'}")
    return [name for name in fields if name not in UNSUPPORTED]


def _same(value: object, other: object) -> bool:
    """Whether two JSON values are equal; unlike in Python, true differs from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
