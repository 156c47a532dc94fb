"""The output folder of lp-bench, and Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lp_runtime.errors import ConfigError


@contextmanager
def writing_to(folder: str) -> Iterator[Path]:
    """Yield the output folder, which is created if necessary; an OSError inside becomes a ConfigError."""
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise ConfigError(f"output={folder}: {error.strerror or error}") from error


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])
