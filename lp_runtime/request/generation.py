"""Results of a request for its caller: deltas while it runs, a Generation at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lp_runtime.request.output import Event, Report
from lp_runtime.request.request_text import RequestText


@dataclass(frozen=True, kw_only=True)
class Generation(Report):
    """The result of one request: its text, and the statistics of request.output.Report.

    Attributes:
        text: the new text, without the prompt; "" if the model has no tokenizer. It ends with the stop string, if any.
        token_ids: the new tokens.
        logprobs: the model's log-probability of each new token, before processors; None if not requested. With
            top_logprobs or prompt_logprobs, each is a request.output.Logprob.
        token_texts: text of each new token, if log-probabilities are requested. Joined, they equal the text, except for
            what follows a stop string.
        stop: the stop string that ended the text; None without one.
        message: the answer to `messages`, as in the OpenAI API: a dict with role, content and, if the model wrote them,
            reasoning_content and tool_calls. It can be appended to the messages. None if a prompt was given.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    token_texts: list[str] | None = None
    stop: str | None = None
    message: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        deltas: Sequence[Delta],
        report: Report,
        stop: str | None = None,
        read_message: Callable[[list[int]], dict[str, Any]] | None = None,
    ) -> Generation:
        token_ids = [token for delta in deltas for token in delta.token_ids]
        logprobs = [value for delta in deltas for value in delta.logprobs or ()]
        return cls(
            **vars(report),
            text="".join(delta.text for delta in deltas),
            token_ids=token_ids,
            logprobs=logprobs or None,
            token_texts=[text for delta in deltas for text in delta.token_texts] if logprobs else None,
            stop=stop,
            message=None if read_message is None else read_message(token_ids),
        )

    @property
    def steps(self) -> int:
        """Number of steps, including the prefill's; extra forward passes of exactness="strict" count as steps."""
        return self.num_steps

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def compression_ratio(self) -> float:
        """S: new tokens per step; 0.0 if the request was cancelled before its first step."""
        return self.num_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.num_tokens else 0.0


@dataclass(frozen=True)
class Delta:
    """Text and tokens that one step adds to a stream.

    Attributes:
        text: text that the step's tokens complete; may be empty.
        token_ids: empty in a final delta that only completes the text.
        logprobs, found_by, sources: of each token, see request.output.StepOutput.
        token_texts: with log-probabilities, the texts of the tokens, of this delta or earlier ones, whose text is final
            only now: in order, one for each token of the request in all deltas together.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    found_by: list[int] | None = None
    sources: list[str] | None = None
    token_texts: Sequence[str] = ()


class GenerationStream:
    """Iterator over the deltas of one request. Closing the stream early, from any thread, cancels the request.

    Args:
        events: yielded by the launcher: a StepOutput per step, then a Report.
        text: None if the model has no tokenizer.
        read_message: returns the message of an answer's tokens; None if the text is not an answer.
        is_closed: set by `close`, so that `events` can end during a step; None for a new one.

    Attributes:
        generation: the complete result after the iteration; None before, and if the stream was closed early.
        has_text: False if the model has no tokenizer; deltas then contain token ids only.
    """

    def __init__(
        self,
        events: Generator[Event, None, None],
        text: RequestText | None,
        read_message: Callable[[list[int]], dict[str, Any]] | None = None,
        is_closed: threading.Event | None = None,
    ):
        self.generation: Generation | None = None
        self.has_text = text is not None
        self._events = events
        self._is_closed = is_closed or threading.Event()
        self._lock = threading.Lock()  # held while a generator runs
        # Holds no reference to this stream, so that a stream that is dropped early cancels its request at once.
        self._deltas = _deltas_of(events, text, read_message)

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> Delta:
        try:
            with self._lock:
                return next(self._deltas)
        except StopIteration as end:
            if not self._is_closed.is_set():
                self.generation = self.generation or end.value
            raise
        finally:
            if self._is_closed.is_set():
                self.close()

    def close(self) -> None:
        """Cancel the rest of the request; during another thread's `next`, that thread ends it after the step."""
        self._is_closed.set()
        if self._lock.acquire(blocking=False):
            try:
                self._deltas.close()
                self._events.close()
            finally:
                self._lock.release()


def _deltas_of(
    events: Iterable[Event],
    text: RequestText | None,
    read_message: Callable[[list[int]], dict[str, Any]] | None,
) -> Generator[Delta, None, Generation | None]:
    """Yield the deltas of a request; return its result, or None if it has no report."""
    deltas: list[Delta] = []
    generation = None
    for event in events:
        if not isinstance(event, Report):
            added, texts = text.add(event.token_ids) if text else ("", [])
            deltas.append(Delta(added, event.token_ids, event.logprobs, event.found_by, event.sources, texts))
            yield deltas[-1]
            continue
        rest, texts = text.finish() if text else ("", [])
        if rest or texts:
            deltas.append(Delta(rest, [], token_texts=texts))
            yield deltas[-1]
        generation = Generation.of(deltas, event, text.stop if text else None, read_message)
    return generation
