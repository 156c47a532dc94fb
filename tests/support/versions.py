"""Marks for features that older allowed versions of transformers (pyproject.toml) do not have yet."""

import pytest
import transformers

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


def needs_transformers(minor: int, what: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test before transformers 5.`minor`, the first version that does `what`."""
    return pytest.mark.skipif((5, minor) > VERSION, reason=f"transformers 5.{minor} is the first that {what}")


needs_rotary_by_length = needs_transformers(20, "lets rotary factors go by each token's own length")
needs_sliced_vocabulary = needs_transformers(21, "slices vocabularies, of any size")
