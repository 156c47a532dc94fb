"""Conversations in the order of roles that every chat template accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # as in Claude Code's own messages to the model
SYSTEM = ("system", "developer")


def in_strict_order(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with at most one of the system, which is the first, and no two of the user in a row.

    Later system messages become text of the user, inside REMINDER. Contents must be texts.
    """
    ordered: list[dict[str, Any]] = []
    for message in messages:
        changed = {**message}
        if changed["role"] in SYSTEM:
            is_first = all(each["role"] == "system" for each in ordered)
            changed["role"] = "system" if is_first else "user"
            changed["content"] = changed["content"] if is_first else REMINDER.format(changed["content"])
        if ordered and ordered[-1]["role"] == changed["role"] and changed["role"] in ("system", "user"):
            ordered[-1]["content"] = "\n\n".join(filter(None, (ordered[-1]["content"], changed["content"])))
        else:
            ordered.append(changed)
    return ordered
