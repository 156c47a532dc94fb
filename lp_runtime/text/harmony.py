"""Marks of harmony, OpenAI's format of answers that are messages on channels."""

from __future__ import annotations

MESSAGE_START, MESSAGE, END = "<|start|>", "<|message|>", "<|end|>"
ANALYSIS = "<|channel|>analysis"
RECIPIENT = "to="  # of a tool call; models also leave out `functions.` before the name


def content_start(text: str) -> int | None:
    """Return where the text of an answer's first message begins that is content; None before it."""
    start = 0
    while (place := text.find(MESSAGE, start)) >= 0:
        header, start = text[start:place].rpartition(MESSAGE_START)[2], place + len(MESSAGE)
        if ANALYSIS not in header and RECIPIENT not in header:
            return start
    return None
