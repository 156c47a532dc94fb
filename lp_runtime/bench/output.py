"""The output folder of lp-bench, and Markdown tables."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lp_runtime.errors import ConfigError, LookaheadError
from lp_runtime.utils.files import write_whole


def check_folder(folder: str | None) -> None:
    """Create an output folder if one is given; ConfigError, before anything is measured, if it cannot be written."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"output={folder}: {error.strerror or error}") from error


def report(text: str, folder: str | None, files: Mapping[str, bytes]) -> None:
    """Write the files of a report to an output folder, if one is given, and print its text.

    The files come first, since stdout may have lost its reader; and the text is printed if they cannot be written.
    """
    try:
        for name, data in files.items() if folder is not None else ():
            write_whole(Path(str(folder)) / name, data)
    except OSError as error:
        print(text)
        raise LookaheadError(f"output={folder}: writing failed: {error.strerror or error}") from error
    print(text)


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])
