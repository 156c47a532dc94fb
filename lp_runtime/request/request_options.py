"""Options of a request, as callers give them; RequestBuilder makes a Request of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.text.reasoning import Reasoning


class RequestOptions(TypedDict, total=False):
    """Options of a request in addition to its prompt and max_new_tokens.

    Attributes:
        messages: a conversation in place of a prompt, for the model's chat template: dicts with "role" and "content".
        eos: whether to stop at the model's end-of-sequence token, which is kept. Default True.
        lookahead: drafting settings; the output does not depend on them. Default: the runtime's.
        sampling: how successors are sampled. Default: the runtime's.
        sample: index of one of several independent samples of the same seed, >= 0. Default 0.
        stop: strings; decoding ends after the first one that the new text contains. Default: the model's stop_strings.
        stop_after: first new tokens in whose text no stop string ends. Default 0.
        max_time: seconds after which to stop, at the end of a step. Default: the model's.
        logprobs: whether to report the log-probability of each new token. Default False.
        top_logprobs: number of likeliest tokens to report with each log-probability, 0 to 20, in the `top` of each of a
            generation's `logprobs`. Default 0.
        prompt_logprobs: whether to report log-probabilities of the prompt's tokens as well, in the `prompt` of the
            first of a generation's `logprobs`. Default False.
        trace: whether each delta says which replica verified each new token (`Delta.found_by`), and which source
            drafted it (`Delta.sources`). Default False.
        request_id: name of the request in logs. Default "".
        cache_salt: cached prefixes and draft tables are shared only between requests of equal salts. Default "".
        constraint: what the new text must match. Default: any text.
        is_answer: whether the new text is a separate text, as a chat's answer is, and does not continue the prompt's.
            Some tokenizers strip the first space of a text. Default: whether `messages` is given.
        skip_special_tokens: whether special tokens show no text. If false, all of them do but the one that ended the
            text. Default True.
        reasoning: marks of the answer's reasoning part, in which stop strings have no effect. Default: none.
        stop_token_ids: further tokens to stop after, also with eos=False. Default: none.
        tools: functions that the model may call, in the OpenAI API's format, for the chat template; with `messages`.
        chat_template_kwargs: variables of the chat template, such as enable_thinking; with `messages`.
        prediction: text or token ids that the new text probably contains much of, such as a file that is to be edited.
            The drafter "full" copies from it; the output does not depend on it. Default: none.
        processors: transformers LogitsProcessors. They must pickle, and replicas must be able to import their classes.
            Each request has a copy. A processor that does not set prefix_only = True is called once per new token, in
            order, on one replica. Default: none.
    """

    messages: Sequence[Mapping[str, Any]]
    eos: bool
    lookahead: LookaheadConfig | None
    sampling: SamplingConfig | None
    sample: int
    stop: Sequence[str] | None
    stop_after: int
    max_time: float | None
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    trace: bool
    request_id: str
    cache_salt: str
    processors: Sequence[LogitsProcessor]
    constraint: ConstraintConfig | None
    is_answer: bool
    skip_special_tokens: bool
    reasoning: Reasoning | None
    stop_token_ids: Sequence[int]
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    prediction: str | Sequence[int]
