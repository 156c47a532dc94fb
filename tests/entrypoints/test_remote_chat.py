"""Tests of lp-chat url=...: conversations with a server."""

from __future__ import annotations

import io

import pytest
from support.fake_openai import fake_server

from lp_runtime.entrypoints.cli import chat_main


@pytest.fixture
def converse(monkeypatch, capsys):
    """Return a function that runs lp-chat on lines of input and returns (exit status, stdout, stderr)."""

    def run(lines: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        try:
            chat_main(list(arguments))
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return run


def test_chat_sends_settings_and_history_without_failed_turns(converse, tmp_path):
    key = tmp_path / "key"
    key.write_text("my-key\n", encoding="utf-8-sig")  # as Windows editors write it
    answers: dict[int, list[str] | int] = {0: ["Hel", "lo."], 1: 503, 2: ["Fi", "ne", ""], 3: ["Yes."]}
    with fake_server(answers.__getitem__) as (url, fake):
        status, out, err = converse(
            "Hi\nTwo\nThree\nFour\n/quit\n", f"url={url}", f"api_key_file={key}", "system=Be brief.",
            "max_new_tokens=9", "sampling.temperature=0.5", "sampling.seed=3",
        )  # fmt: skip
    assert status == 0 and out == "Hello.\nFine\nYes.\n"
    assert "status 503: not now (/reset starts again)" in err and "the answer ended before its end" in err
    assert fake.keys == ["Bearer my-key"]
    first, *_, last = fake.bodies
    assert (first["model"], first["max_tokens"], first["temperature"], first["seed"]) == ("fake", 9, 0.5, 3)
    assert [each["content"] for each in first["messages"]] == ["Be brief.", "Hi"]
    assert [each["content"] for each in last["messages"]] == ["Be brief.", "Hi", "Hello.", "Four"], (
        "what failed is left out"
    )


def event(**delta: object) -> dict:
    """Return an event of a chat's stream."""
    return {"choices": [{"delta": delta}]}


def test_reasoning_is_shown_on_stderr_and_not_sent_back(converse):
    answers = [
        [event(reasoning_content="Let me "), event(reasoning_content="see."), "Yes."],
        [event(reasoning="Well."), event(content=None), {"choices": [None, {"delta": None}]}, "No."],
    ]
    with fake_server(answers.__getitem__) as (url, fake):
        status, out, err = converse("One\nTwo\n", f"url={url}")
    assert status == 0 and out == "Yes.\nNo.\n"
    assert err.splitlines()[1:] == ["Let me see.", "Well."]
    assert [each["content"] for each in fake.bodies[1]["messages"]] == ["One", "Yes.", "Two"]


def test_answer_that_is_cut_is_told_from_a_whole_one(converse):
    ends = [{"choices": [{"delta": {}, "finish_reason": reason}]} for reason in ("length", "stop")]
    with fake_server(lambda number: ["a", ends[number]]) as (url, _):
        status, out, err = converse("One\nTwo\n", f"url={url}", "max_time=9")
    assert status == 0 and out == "a\na\n"
    assert err.splitlines()[1:] == [
        "(the answer was cut at its limit; a higher max_new_tokens or max_time allows more)"
    ]


def test_sampling_settings_are_sent_by_their_api_names(converse):
    with fake_server(lambda number: ["a"]) as (url, fake):
        off = ("sampling.no_repeat_ngram_size=0", "sampling.bad_words_ids=[]", "sampling.typical_p=1")
        converse("One\n", f"url={url}", "sampling.min_new_tokens=3", *off)
    (body,) = fake.bodies
    assert body.keys() == {"model", "messages", "min_tokens", "stream"} and body["min_tokens"] == 3


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("no_repeat_ngram_size=2", "no_repeat_ngram_size=2"),
        ("bad_words_ids=[[5]]", "bad_words_ids=[[5]]"),
        ("typical_p=0.5", "typical_p=0.5"),
    ],
)
def test_sampling_setting_without_api_field_is_refused(converse, setting, shown):
    status, _, err = converse("One\n", "url=http://127.0.0.1:1", f"sampling.{setting}")
    assert (status, err) == (2, f"error: sampling.{shown}: not with url, as the API has no field for it\n")


def test_server_setting_with_url_is_refused(converse):
    status, _, err = converse("One\n", "url=http://127.0.0.1:1", "dtype=float32")
    assert (status, err) == (2, "error: dtype=float32: not with url; it is a setting of the server\n")


def test_unreachable_server_is_reported(converse):
    status, _, err = converse("Hi\n", "url=http://127.0.0.1:1")
    assert (status, err) == (2, "error: url=http://127.0.0.1:1: cannot be reached (Connection refused)\n")
    status, _, err = converse("Hi\n", "served_name=x")
    assert (status, err) == (2, "error: served_name: only with url\n")
