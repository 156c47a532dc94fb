"""One answer to a request: its text, tokens and calls so far, and what is counted of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lp_runtime.chat.pieces import ChatParser, Piece
from lp_runtime.chat.stop_trimmer import StopTrimmer
from lp_runtime.request.generation import Delta
from lp_runtime.scheduler.job import Job

REASONS = {"eos": "stop", "stop": "stop"}  # OpenAI's finish_reason by Generation.finish_reason; others are "length"
COPIED = "text"  # source of drafts that are copied from the prompt, the text so far, or a prediction


@dataclass
class Choice:
    """One text of an answer, which grows while its job decodes."""

    index: int
    job: Job
    trimmer: StopTrimmer
    prefix: str = ""  # still to be shown before the new text: the prompt with `echo`
    prefix_texts: Sequence[str] = ()  # of the prompt's tokens; only with `echo` and log-probabilities
    offset: int = 0  # characters of the tokens shown with log-probabilities so far
    text: str = ""  # only in answers that are not streamed
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the new tokens, as the next two; if asked for
    found_by: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)  # up to the first that is not final; with log-probabilities
    reason: str | None = None  # OpenAI's finish_reason; None before the end
    stop: str | None = None  # the stop string that ended the text
    parser: ChatParser | None = None  # None for plain text
    max_calls: int | None = None  # that the answer shows at most; None for no limit
    shows_new: bool = True  # with `echo` a client may ask for the prompt only, and gets one token that is not counted
    num_shown: int = 0  # new tokens that events have shown
    arguments: list[str] = field(default_factory=list)  # of the last call, piece by piece; empty without calls
    num_reasoning: int = 0  # tokens of the reasoning text
    uncounted_bytes: int = 0  # of the reasoning text, after the tokens in `num_reasoning`; see Form.usage

    @property
    def num_final(self) -> int:
        """Number of new tokens that can be shown: with log-probabilities, those whose text is final."""
        return len(self.token_texts) if self.job.request.logprobs else len(self.tokens)

    def add(self, delta: Delta) -> str:
        """Append a delta; return the text that may be shown now."""
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.found_by += delta.found_by or ()
        self.sources += delta.sources or ()
        self.token_texts += delta.token_texts
        return self.trimmer.add(delta.text)

    def finish(self) -> str:
        """Set `reason` and `stop` after the job has ended; return the remaining text to show."""
        generation = self.job.final_generation
        self.stop = generation.stop
        self.reason = "stop" if self.stop is not None else REASONS.get(generation.finish_reason, "length")
        return self.trimmer.finish(generation.stop)

    def pieces(self, text: str) -> list[Piece]:
        """Split new text into pieces of the answer; once the choice has ended, return all remaining pieces."""
        if self.parser is None:
            return [Piece("content", text)] if text else []
        pieces = self.parser.add(text)
        if self.reason is not None:
            pieces += self.parser.finish(self.reason == "length" or self.stop is not None)
        pieces = [each for each in pieces if self.max_calls is None or each.call < self.max_calls]
        for piece in pieces:
            if piece.kind == "reasoning":
                self.uncounted_bytes += len(piece.text.encode(errors="replace"))  # as TokenTexts does
            elif piece.kind == "arguments":
                if piece.name is not None:
                    self.arguments = []
                self.arguments.append(piece.text)
        return pieces

    @property
    def is_call_cut(self) -> bool:
        """Whether a limit or a stop string has ended the text inside the last call."""
        if (self.stop is None and self.reason != "length") or not self.arguments:
            return False
        try:
            return not isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return True


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    """Return OpenAI's `usage` of the choices, without reasoning; samples of one prompt count its tokens once."""
    prompts = {id(choice.job.request.prompt_ids): len(choice.job.request.prompt_ids) for choice in choices}
    num_new, num_prompt = sum(len(choice.tokens) for choice in choices if choice.shows_new), sum(prompts.values())
    num_fed, num_accepted = _num_drafted([choice for choice in choices if choice.job.request.prediction], COPIED)
    # Cached tokens of each prompt: those of its first sample only, because later samples may hit what it cached.
    cached: dict[int, int] = {}
    for choice in choices:
        if choice.job.generation is not None:
            cached.setdefault(id(choice.job.request.prompt_ids), choice.job.generation.cached_tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_fed - num_accepted,
        },
    }


def _num_drafted(choices: list[Choice], source: str | None = None) -> tuple[int, int]:
    """Return (draft tokens fed, draft tokens accepted) of ended choices, of one source or of all."""
    num_fed = num_accepted = 0
    for choice in choices:
        if choice.job.generation is not None:
            counts = choice.job.generation.counts
            for name, fed, accepted in zip(counts.sources, counts.fed, counts.accepted, strict=True):
                if source in (None, name):
                    num_fed += sum(fed)
                    num_accepted += sum(accepted)
    return num_fed, num_accepted


def acceptance_of(choices: list[Choice]) -> dict[str, object]:
    """Return drafting statistics of the choices, in the format of vLLM's per-request metrics."""
    num_steps = sum(choice.job.generation.steps for choice in choices if choice.job.generation is not None)
    num_fed, num_accepted = _num_drafted(choices)
    num_new = sum(len(choice.tokens) for choice in choices)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": num_new / max(1, num_steps),
            "draft_acceptance_rate": num_accepted / max(1, num_fed),
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_fed,
        }
    }
