"""Tests of an answer's choices while they grow: which text is shown, and when."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from lp_runtime.chat.chat_format import ChatFormat
from lp_runtime.chat.stop_trimmer import StopTrimmer
from lp_runtime.request.generation import Delta
from lp_runtime.request.output import Logprob
from lp_runtime.server.answers import Answers
from lp_runtime.server.openai.choice import Choice
from lp_runtime.server.openai.common import StreamOptions
from lp_runtime.server.openai.forms import ChatForm, CompletionForm
from lp_runtime.server.openai.parts import Message


def choice_of(prefix=""):
    ids = [ord(each) for each in prefix]
    request = SimpleNamespace(prompt_ids=ids, stop=[")"], trace=False, eos_token_ids=(), logprobs=True)
    request.prediction = None
    return Choice(0, SimpleNamespace(request=request, generation=None), StopTrimmer(request.stop), prefix, list(prefix))


def texts_of(label=chr):
    return SimpleNamespace(label=label)


def events(texts, choice, form):
    """Return the events of a stream whose parts are `texts`: (text, tokens, finish reason) each."""

    async def grown():
        for text, tokens, reason in texts:
            choice.tokens += tokens
            choice.logprobs += [Logprob(-1.0, ((token, -1.0), (token + 1, -2.0))) for token in tokens]
            choice.token_texts += map(chr, tokens)
            choice.reason = reason
            yield choice, text

    async def collect():
        answers = Answers(None, set())
        return [each async for each in answers.events(grown(), [choice], form)]

    return asyncio.run(collect())


def bodies(lines):
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(
    "texts", [[("", [], "stop")], [("", [65], None), ("AB", [66], "length")], [("A", [65], None), ("", [], "stop")]]
)
def test_stream_echoes_prompt_when_first_tokens_have_no_text(texts):
    lines = events(texts, choice_of("Prompt: "), CompletionForm("demo", texts_of(), None))
    shown = "".join(body["choices"][0]["text"] for body in bodies(lines))
    assert shown == "Prompt: " + "".join(text for text, *_ in texts)


@pytest.mark.parametrize("num_top", [None, 0])
def test_work_per_chunk_does_not_grow_with_text_length(num_top):
    calls = []

    def text_of(token):
        calls.append(token)
        return chr(token)

    lines = events([("A", [65], None)] * 50, choice_of(), CompletionForm("demo", texts_of(text_of), num_top))
    assert len(calls) <= 50
    if num_top is not None:
        offsets = [body["choices"][0]["logprobs"]["text_offset"] for body in bodies(lines)]
        assert offsets == [[place] for place in range(50)]


def test_top_logprobs_list_all_tokens_of_equal_text():
    form = CompletionForm("demo", texts_of(lambda token: "A"), 2)
    (body,) = bodies(events([("A", [65], "length")], choice_of(), form))
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"A": -1.0, "token_id:66": -2.0}]


def test_unexpected_error_ends_stream_with_an_error_event(caplog):
    def text_of(token):
        raise KeyError(token)

    *lines, last = events([("A", [65], None)], choice_of(), CompletionForm("demo", texts_of(text_of), 0))
    assert last == "data: [DONE]\n\n"
    (error,) = [json.loads(line.removeprefix("data: "))["error"] for line in lines]
    assert error["type"] == "server_error" and error["message"].startswith("KeyError: ")
    assert "an answer has failed" in caplog.text


def test_stop_string_that_did_not_end_the_text_is_shown():
    """Decoding continues after it, so it is shown; only the stop string that ended the text is removed."""
    choice = choice_of()
    choice.job.final_generation = SimpleNamespace(finish_reason="stop", stop=")")
    shown = [choice.add(Delta(text, [])) for text in ("(a)b", ")", ")", "c)")]
    assert shown == ["(a)b", "", ")", ")c"]
    assert choice.finish() == "" and choice.reason == "stop"


@pytest.mark.parametrize(
    ("finish_reason", "stop", "is_whole"), [("eos", None, True), ("length", None, False), ("stop", "x", False)]
)
def test_only_a_call_that_a_limit_or_a_stop_string_cuts_is_unfinished(finish_reason, stop, is_whole):
    choice, call = choice_of(), "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    choice.parser = ChatFormat("", "qwen3_coder").parser(True, "")
    choice.job.final_generation = SimpleNamespace(finish_reason=finish_reason, stop=stop)
    form, text = ChatForm("demo", texts_of(), None), call + choice.finish()
    body = form.delta(choice, text, slice(0, 0))
    (call,) = body["delta"]["tool_calls"]
    assert call["function"]["arguments"] == ('{"a": 1}' if is_whole else '{"a": 1')
    assert body["finish_reason"] == {"eos": "tool_calls"}.get(finish_reason, finish_reason)


def test_usage_of_a_chat_counts_its_reasoning_so_far_and_at_the_end():
    text, options = "<think>so it is</think>ab", StreamOptions(include_usage=True, continuous_usage_stats=True)
    choice, texts = choice_of(), SimpleNamespace(bytes_of=lambda token: chr(token).encode())
    choice.parser = ChatFormat("</think>").parser([], "")
    form = ChatForm("demo", texts, None, options)
    parts = [(each, [ord(each)], None) for each in text]
    usages = [body["usage"] for body in bodies(events([*parts, ("", [], "stop")], choice, form))]
    counts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert counts == sorted(counts) and set(counts) == set(range(len("so it is") + 1))
    choice.parser, choice.text, choice.num_reasoning = ChatFormat("</think>").parser([], ""), text, 0
    assert form.whole([choice])["usage"] == usages[-1]


@pytest.mark.parametrize("calls", [None, []])
def test_message_without_tool_calls_has_no_tool_calls_field(calls):
    """Templates test whether the field exists, and then use its length."""
    message = Message(role="assistant", content="x", tool_calls=calls, refusal=None)
    assert ChatFormat("").history([message.plain()]) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        *((text, {}) for text in ("", " ", "null", "[]", "[1]", "5", '"x"', '""')),
        *((text, {"a": "x\n"}) for text in ('{"a": "x\\n"}', '{"a": "x\n"}', r'"{\"a\": \"x\n\"}"', '{"a": "x\n",}')),
        ("x", "x"),
        ('{"a": "x', '{"a": "x'),
    ],
)
def test_tool_call_arguments_in_history_are_an_object(sent, shown):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": sent}}
    (message,) = ChatFormat("").history([Message(role="assistant", tool_calls=[call]).plain()])
    (plain,) = message["tool_calls"]
    assert plain["function"]["arguments"] == shown
