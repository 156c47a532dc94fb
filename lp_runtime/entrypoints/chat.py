"""lp-chat: a conversation on the terminal, one streamed answer per message."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType

from lp_runtime.chat.answer import AnswerReader
from lp_runtime.chat.pieces import Piece
from lp_runtime.config.commands import ChatConfig
from lp_runtime.errors import LookaheadError, ReplicaError
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.tokenizer import conversation, encode_chat
from lp_runtime.request.generation import GenerationStream
from lp_runtime.runtime import LookaheadRuntime

HELP = "/reset starts again, /undo takes back the last question, /quit (or Ctrl-D) ends; Ctrl-C stops an answer"
COMMAND = re.compile(r"/[a-z]+")  # such a line is no message: a mistyped command would become part of the conversation
CUT = ("length", "time")  # finish_reason of a Generation that ends at a limit

Messages = Sequence[dict[str, str]]


def check_chat(config: ChatConfig) -> None:
    """Check that the model can chat, before replicas start."""
    encode_chat(load_tokenizer(config.model), conversation(["Hello"]))


def chat(runtime: LookaheadRuntime, config: ChatConfig) -> None:
    converse(config.system, partial(_answer, runtime, config))


def converse(system_message: str | None, answer_to: Callable[[Messages], str]) -> None:
    """Answer messages from stdin, one per line, until it ends; everything but the answers goes to stderr.

    `answer_to` prints the answer to a conversation and returns its text. It may raise a LookaheadError for a message
    that cannot be answered; the conversation then goes on without that message. A ReplicaError ends the conversation.
    """
    system = [{"role": "system", "content": system_message}] if system_message else []
    messages: list[dict[str, str]] = []  # questions and answers in turn
    print(HELP, file=sys.stderr)
    while (text := _read_line()) is not None:
        match text.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/help":
                print(HELP, file=sys.stderr)
            case "/reset":
                messages.clear()
            case "/undo":
                del messages[-2:]
            case word if COMMAND.fullmatch(word):
                print(f"error: {word} is no command: {HELP}", file=sys.stderr)
            case _:
                question = {"role": "user", "content": text}
                try:
                    answer = answer_to([*system, *messages, question])
                except ReplicaError:
                    raise
                except LookaheadError as error:
                    print(f"error: {error} (/reset starts again)", file=sys.stderr)
                else:
                    messages += [question, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    if sys.stdin is not None and sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline() if sys.stdin is not None else ""
    return line.rstrip("\n") if line else None


def _answer(runtime: LookaheadRuntime, config: ChatConfig, messages: Messages) -> str:
    request = runtime.request(
        messages=messages, max_new_tokens=config.max_new_tokens, stop=config.stop, max_time=config.max_time
    )
    with closing(runtime.stream_request(request, needs_text=True)) as stream:
        shown = show_answer(_texts(stream, runtime.answer_reader(request)))
    if stream.generation and stream.generation.finish_reason in CUT:
        show_cut(config)
    if stream.generation and stream.generation.seed is not None and config.sampling.seed is None:
        print(f"(seed {stream.generation.seed})", file=sys.stderr)
    return shown


def show_cut(config: ChatConfig) -> None:
    limits = "max_new_tokens" if config.max_time is None else "max_new_tokens or max_time"
    print(f"(the answer was cut at its limit; a higher {limits} allows more)", file=sys.stderr)


def _texts(stream: GenerationStream, reader: AnswerReader) -> Iterator[tuple[str, str]]:
    for delta in stream:
        yield from map(_text_of, reader.add(delta.token_ids))
    yield from map(_text_of, reader.finish())


def _text_of(piece: Piece) -> tuple[str, str]:
    return ("", piece.text) if piece.kind == "content" else (piece.text, "")


def show_answer(texts: Iterable[tuple[str, str]]) -> str:
    """Print an answer's pairs (piece of reasoning, piece of text); either piece may be empty. Ctrl-C stops the answer.

    Text goes to stdout, and is returned; reasoning goes to stderr.
    """
    shown: list[str] = []
    is_reasoning = False
    try:
        with interruptible() as interrupted:
            for reasoning, text in texts:
                if reasoning:
                    print(reasoning, end="", file=sys.stderr, flush=True)
                    is_reasoning = True
                if text:
                    if is_reasoning:
                        print(file=sys.stderr, flush=True)
                        is_reasoning = False
                    shown.append(text)
                    print(text, end="", flush=True)
                if interrupted.is_set():
                    break
    finally:
        if is_reasoning:
            print(file=sys.stderr, flush=True)
        if shown:
            print(flush=True)
    return "".join(shown)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Make the first Ctrl-C in the block set the yielded event; the next one raises KeyboardInterrupt."""
    interrupted = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
