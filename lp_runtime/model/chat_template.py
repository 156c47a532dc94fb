"""A model's chat template: text, rendering, and the parser that the model brings for its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_template_utils import render_jinja_template

from lp_runtime.model.tokenizer import TEMPLATE_SECONDS, chat_template
from lp_runtime.utils.time_limit import time_limit


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, independent of a tokenizer."""

    source: str  # the template's text; of several templates, the one for tools
    # Special tokens that the template may write, by their names.
    variables: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[str] = ()  # texts of the vocabulary's added tokens
    special_tokens: Sequence[str] = ()  # those of them that a text shows only if it is asked to
    # The model's description of its answers, for `response_parser`; None if it brings none.
    response_template: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
        templates = getattr(tokenizer, "chat_template", None)
        source = templates.get("tool_use") if isinstance(templates, dict) else None
        added = tokenizer.added_tokens_decoder.values()
        return cls(
            source or chat_template(tokenizer),
            tokenizer.special_tokens_map,
            [token.content for token in added],
            [token.content for token in added if token.special],
            getattr(tokenizer, "response_template", None),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return a conversation as text; a template may raise anything."""
        options: dict[str, Any] = {"tools": tools, "chat_template": self.source, **self.variables}
        conversations: Any = [list(messages)]
        with time_limit(TEMPLATE_SECONDS):
            rendered: Any = render_jinja_template(conversations, add_generation_prompt=add_generation_prompt, **options)
        return rendered[0][0]

    def response_parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> ResponseParser:
        """Return transformers' streaming parser of an answer to a prompt; there must be a response template."""
        assert self.response_template is not None
        return ResponseParser(dict(self.response_template), prefix=prompt_end, tools=[dict(tool) for tool in tools])
