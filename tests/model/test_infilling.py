"""Fill-in-the-middle prompts: order of the marks, and tokenizers without them."""

from __future__ import annotations

import copy

import pytest

from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import RequestError
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.tokenizer import MARKS, encode_infilling


@pytest.mark.parametrize("marks", MARKS)
def test_infilling_marks_precede_prefix_suffix_and_middle(marks):
    tokenizer = copy.deepcopy(load_tokenizer(ModelConfig()))
    with pytest.raises(RequestError, match="suffix: the model's tokenizer has no tokens for fill-in-the-middle"):
        encode_infilling(tokenizer, "def f(x):\n", "\n", False)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    ids = encode_infilling(tokenizer, "def f(x):\n", f"\nprint(f(1)) {marks[2]}", True)
    before, between, after = marks
    assert tokenizer.decode(ids) == f"{before}def f(x):\n{between}\nprint(f(1)) {after}{after}"
    assert ids.count(tokenizer.convert_tokens_to_ids(after)) == 1, "marks of the client are text"
