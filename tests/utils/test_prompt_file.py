"""Tests of prompts files: text, turns, token ids, Spec-Bench's categories, and one-line errors."""

from __future__ import annotations

import json

import pytest

from lp_runtime.errors import ConfigError
from lp_runtime.utils.prompt_file import Prompt, check_conversations, read_prompts


def written(folder, *records: object) -> str:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_turns_and_categories_are_read(tmp_path):
    path = written(
        tmp_path,
        {"turns": ["one", "two"], "category": "stem"},
        {"turns": ["alone"], "category": "qa"},
        {"turns": ["three"]},
    )
    prompts = read_prompts(path, "turns")
    assert prompts[0] == Prompt(0, 1, "one", ("one", "two"), "stem")
    assert [prompt.task for prompt in prompts] == ["multi-turn", "qa", "in"]
    check_conversations(prompts, path, "turns")
    with pytest.raises(ConfigError, match="turns=all: field 'turns' of .* holds no conversation of several turns"):
        check_conversations(prompts[1:], path, "turns")


def test_token_ids_have_no_turns(tmp_path):
    assert read_prompts(written(tmp_path, {"ids": [1, 2]}), "ids", are_ids=True) == [Prompt(0, 1, [1, 2], (), "in")]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"q": "text"}, {"q": ["a", "b"]}], "line 2: field 'q' must hold text, as line 1's does"),
        ([{"q": ["a"]}, {"q": ["b"]}, {"q": "text"}], "line 3: field 'q' must hold a list, as line 1's does"),
        ([{"q": ["a", ""]}], "line 1: field 'q' must hold text"),
        ([{"q": ["a", 7]}], "line 1: field 'q' must hold text"),
        ([{"q": []}], "line 1: field 'q' must hold text"),
        ([{"q": {"a": "b"}}], "line 1: field 'q' must hold text"),
        ([{"p": "text"}], "line 1: has no field 'q'"),
    ],
)
def test_invalid_prompt_is_refused(tmp_path, records, message):
    with pytest.raises(ConfigError) as caught:
        read_prompts(written(tmp_path, *records), "q")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "one"}\n')
    assert [prompt.value for prompt in read_prompts(str(path), "prompt")] == ["one"]
