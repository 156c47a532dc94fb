"""Routes that count or show tokens.

vLLM's /tokenize and /detokenize, Anthropic's /v1/messages/count_tokens, OpenAI's /v1/responses/input_tokens.
"""

from __future__ import annotations

from typing import cast

from fastapi import FastAPI, Request

from lp_runtime.errors import RequestError
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.server.anthropic.messages_api import Messages
from lp_runtime.server.openai.parts import Message, OpenPart
from lp_runtime.server.openai.responses_api import Responses
from lp_runtime.server.status import StatusRoutes
from lp_runtime.server.submission import Submitter


class Tokenize(OpenPart):
    """The body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    split_special_tokens: bool = False
    return_token_strs: bool = False


class Detokenize(OpenPart):
    model: str | None = None
    tokens: list[int]


class TokenRoutes:
    """Routes that turn text into token ids and back, or count them.

    `submitter` encodes conversations exactly as for a chat request.
    """

    def __init__(self, runtime: LookaheadRuntime, status: StatusRoutes, submitter: Submitter, tokenizer: Tokenizer):
        self._info, self._status = runtime.info, status
        self._submitter, self._tokenizer = submitter, tokenizer

    def add_to(self, app: FastAPI) -> None:
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.post("/v1/messages/count_tokens")(self.count_tokens)
        app.post("/v1/responses/input_tokens")(self.count_input_tokens)

    async def tokenize(self, body: Tokenize) -> dict[str, object]:
        self._status.check_model(body.model)
        if body.prompt is not None and body.messages is None:
            ids = await self._submitter.encode(
                body.prompt, body.split_special_tokens, add_special_tokens=body.add_special_tokens
            )
        elif body.messages is not None and body.prompt is None:
            messages = [message.plain() for message in body.messages]
            ids = await self._submitter.encode_chat(messages, body.split_special_tokens)
        else:
            raise RequestError("prompt and messages: give one of them")
        strings = self._tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        length = self._info.context_length
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    async def detokenize(self, body: Detokenize) -> dict[str, object]:
        """Return the text of token ids, special tokens included."""
        self._status.check_model(body.model)
        size = self._info.vocabulary_size
        for token in body.tokens:
            if not 0 <= token < size:
                raise RequestError(f"token id {token}: must be 0 to {size - 1}")
        return {"prompt": cast(str, self._tokenizer.decode(body.tokens))}

    async def count_tokens(self, body: Messages, request: Request) -> dict[str, int]:
        return {"input_tokens": await self._count(body, request)}

    async def count_input_tokens(self, body: Responses, request: Request) -> dict[str, object]:
        return {"object": "response.input_tokens", "input_tokens": await self._count(body, request)}

    async def _count(self, body: Messages | Responses, request: Request) -> int:
        self._status.check_model(body.model)
        self._submitter.check_fields(body, request.state.request_id)
        tools, kwargs = body.tool_use().tools, {**body.template_kwargs(), **body.rendering()}
        return len(await self._submitter.encode_chat(body.conversation(), body.split_special_tokens, tools, kwargs))
