"""Tests of lp-bench url=...: its requests, measurements and counts, with a fake server and with ours."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading

import pytest
from support.fake_openai import fake_server
from support.serving import served

from lp_runtime import ConfigError, LookaheadConfig, LookaheadRuntime
from lp_runtime.bench.load import arrivals, percentile
from lp_runtime.config.commands import BenchConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.entrypoints.cli import bench_main
from lp_runtime.utils.openai_client import Endpoint


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "three")))
    return f"{file}:text"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run lp-bench and return (exit status, stdout, stderr)."""
    try:
        bench_main(list(arguments))
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def test_closed_loop_cycles_through_prompts_and_counts_errors(capsys, prompts, tmp_path):
    gate = threading.Barrier(3)

    def pieces(number: int):
        gate.wait()  # always three concurrent requests
        return {1: 503, 4: ["a", ""]}.get(number % 6, ["a", "b", "c"])

    with fake_server(pieces) as (url, fake):
        status, out, _ = run(
            capsys, f"url={url}", "concurrency=3", "num_requests=12", f"prompts={prompts}", f"output={tmp_path}/out",
            "max_new_tokens=7",
        )  # fmt: skip
    assert status == 0 and fake.num_at_once == 3
    assert sorted(body["prompt"] for body in fake.bodies) == sorted(["one", "two", "three"] * 4)
    assert all(body["model"] == "fake" and body["max_tokens"] == 7 and body["stream"] for body in fake.bodies)
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    assert (report["requests"], report["errors"], report["new tokens"]) == (12, 4, 8 * 6)
    assert (
        report["time to first token ms"]["p50"]
        <= report["time to first token ms"]["p99"]
        <= report["request ms"]["p99"]
    )
    assert "2 x url=" in out and "status 503: not now" in out and "the answer ended before its end" in out
    assert "| inter-token time |" in out and (tmp_path / "out" / "load.md").read_text() == out


def test_open_loop_does_not_wait_for_answers(capsys, prompts):
    everybody = threading.Barrier(6)

    def pieces(number: int):
        everybody.wait()  # no answer before all six requests have arrived
        return ["a"]

    with fake_server(pieces) as (url, fake):
        status, out, _ = run(
            capsys,
            f"url={url}/v1",
            "rate=500",
            "num_requests=6",
            f"prompts={prompts}",
            "chat=true",
            "served_name=other",
        )
    assert status == 0 and fake.num_at_once == 6 and fake.keys == []
    asked = sorted(body["messages"][0]["content"] for body in fake.bodies)  # requests may arrive in another order
    assert asked == sorted(["one", "two", "three"] * 2) and {body["model"] for body in fake.bodies} == {"other"}
    assert all(body["messages"][0]["role"] == "user" and len(body["messages"]) == 1 for body in fake.bodies)
    assert "| 6 | 0 |" in out


def test_report_is_written_if_stdout_cannot_be(capsys, prompts, tmp_path, monkeypatch):
    with fake_server(lambda number: ["a"]) as (url, _), open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        status, _, err = run(capsys, f"url={url}", "num_requests=2", f"prompts={prompts}", f"output={tmp_path}/out")
    assert status == 1 and err.endswith("error: stdout: cannot be written: No space left on device\n")
    assert json.loads((tmp_path / "out" / "load.json").read_text())["requests"] == 2


def test_table_is_printed_if_the_report_cannot_be_written(capsys, prompts, tmp_path):
    folder = tmp_path / "out"

    def pieces(number: int) -> list[str]:
        folder.rmdir()
        folder.touch()
        return ["a"]

    with fake_server(pieces) as (url, _):
        status, out, err = run(capsys, f"url={url}", "num_requests=1", f"prompts={prompts}", f"output={folder}")
    assert status == 1 and "| 1 | 0 |" in out
    assert err.endswith(f"error: output={folder}: writing failed: File exists\n")


STOP = {"choices": [{"text": "", "finish_reason": "stop"}]}


def loaded(capsys, tmp_path, prompts: str, answers: list[list[str | dict]], *arguments: str) -> dict:
    """Return the report of a load run with one request for each answer."""
    with fake_server(answers.__getitem__) as (url, _):
        load = (f"num_requests={len(answers)}", f"output={tmp_path}/out")
        run(capsys, f"url={url}", f"prompts={prompts}", *load, *arguments)
    return json.loads((tmp_path / "out" / "load.json").read_text())


def test_pieces_are_counted_without_usable_usage_numbers(capsys, tmp_path, prompts):
    usages = [{"prompt_tokens": 3}, {"completion_tokens": None}, {"completion_tokens": "7"}, {}, None, [7], "7"]
    answers = [["a", "b", {"choices": [], "usage": usage}, STOP, ""] for usage in usages]
    report = loaded(capsys, tmp_path, prompts, answers)
    assert [(each["num_tokens"], each["error"]) for each in report["answers"]] == [(2, None)] * len(usages)


def test_invalid_choices_are_skipped(capsys, tmp_path, prompts):
    invalid = [[None], None, {"text": "a"}, ["text"], [{"delta": "a"}], [{"delta": None}]]
    report = loaded(capsys, tmp_path, prompts, [[{"choices": choices}, "a"] for choices in invalid])
    assert [(each["num_tokens"], each["error"]) for each in report["answers"]] == [(4, None)] * len(invalid)


@pytest.mark.parametrize("load", [("concurrency=2",), ("rate=1000",)])
def test_failing_requests_are_counted_as_errors(capsys, tmp_path, prompts, monkeypatch, load):
    stream, numbers = Endpoint.stream, itertools.count()

    def failing(self, route, body):
        if next(numbers) % 2:
            raise KeyError("no such thing")
        return stream(self, route, body)

    monkeypatch.setattr(Endpoint, "stream", failing)
    report = loaded(capsys, tmp_path, prompts, [["a"]] * 5, *load)
    assert (report["requests"], report["errors"]) == (5, 2)
    error = next(answer["error"] for answer in report["answers"] if answer["error"])
    assert error.endswith("the answer cannot be read: KeyError: 'no such thing'")


def test_load_continues_after_stderr_fails(capsys, tmp_path, prompts, monkeypatch):
    def gone(text):
        raise BrokenPipeError

    monkeypatch.setattr(sys.stderr, "write", gone)
    assert loaded(capsys, tmp_path, prompts, [["a"]] * 5)["requests"] == 5


def test_null_error_is_ignored(capsys, tmp_path, prompts):
    event = {"error": None, "choices": [{"text": "a"}]}
    answers = [[event], [event, {"error": {"message": None, "code": 5}}]]
    fine, failed = loaded(capsys, tmp_path, prompts, answers, "concurrency=1")["answers"]
    assert fine["error"] is None
    assert failed["error"].endswith("{'message': None, 'code': 5}"), "it is an error"


def test_stream_may_end_after_its_finish_reason(capsys, tmp_path, prompts):
    answers = loaded(capsys, tmp_path, prompts, [["a", STOP, ""], ["a", ""]], "concurrency=1")["answers"]
    assert [each["error"] is None for each in answers] == [True, False]


def test_deltas_without_text_count_as_pieces(capsys, tmp_path, prompts):
    deltas = [
        {"reasoning_content": "a"},
        {"reasoning": "a", "content": None},
        {"tool_calls": [{"index": 0, "function": {"arguments": "a"}}]},
        {"refusal": "a"},
    ]

    def answer(delta):
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        yield {"choices": [{"delta": delta}]}
        yield from ("b", STOP, "")

    report = loaded(capsys, tmp_path, prompts, [answer(delta) for delta in deltas], "chat=true")
    assert len(report["answers"]) == len(deltas)
    for each in report["answers"]:
        assert each["num_tokens"] == 2 and each["inter_token"] > 0


def test_eos_false_sends_ignore_eos(capsys, prompts):
    with fake_server(lambda number: ["a"]) as (url, fake):
        for arguments in ([], ["eos=true"], ["eos=false"]):
            run(capsys, f"url={url}", f"prompts={prompts}", "num_requests=1", *arguments)
    assert [body.get("ignore_eos") for body in fake.bodies] == [None, None, True]


def test_prompts_with_invalid_unicode_are_refused(capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    for argument in ("cache_dir=null", "url=http://127.0.0.1:1"):
        status, _, err = run(capsys, f"prompts={file}:text", argument)
        assert (status, err.splitlines()[-1]) == (2, f"error: {file} line 2: field 'text' is not valid Unicode")


def test_arrivals_follow_a_poisson_process():
    moments = list(itertools.islice(arrivals(4.0, 1), 4001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert moments[0] == 0 and statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)
    assert list(itertools.islice(arrivals(4.0, 1), 9)) == moments[:9]


def test_percentiles_are_measured_values():
    assert [percentile(list(range(1, 101)), each) for each in (50, 90, 99)] == [50, 90, 99]
    assert percentile([3.0], 50) == percentile([1.0, 3.0], 99) == 3.0


@pytest.mark.slow
def test_load_runs_against_our_server(capsys, prompts):
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with (
        LookaheadRuntime(device="cpu", dtype="float32", lookahead=lookahead) as runtime,
        served(runtime, api_keys={"ann": "a-key"}) as (url, scheduler),
    ):
        status, out, _ = run(
            capsys, f"url={url}", "api_key=a-key", "num_requests=4", f"prompts={prompts}", "max_new_tokens=8"
        )
        assert status == 0 and "| 4 | 0 |" in out
        assert scheduler.totals.new_tokens == 32
        status, _, err = run(capsys, f"url={url}", f"prompts={prompts}")
    assert status == 2 and "status 401: the API key is missing or wrong" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["url=ftp://here"], "url=ftp://here: must be http://HOST:PORT"),
        (["url=http://127.0.0.1:1"], "url=http://127.0.0.1:1: cannot be reached (Connection refused)"),
        (["url=http://here", "rate=1e-12"], "rate=1e-12: must be higher; 64 requests would take over 1000000 seconds"),
        (["url=http://a..b:80"], "url=http://a..b:80: must be http://HOST:PORT"),
        ([f"url=http://{'a' * 64}:80"], "must be http://HOST:PORT"),
        (["url=http://user:pw@here"], "with a path or without, and without a user and a query"),
        (["url=http://here/v1?api-version=2024"], "with a path or without, and without a user and a query"),
        (["url=http://here:80/é"], "url=http://here:80/é: must be http://HOST:PORT"),
        (["url=http://here", "degrees=[2]"], "degrees=[2]: has no effect with url"),
        (["url=http://here", "lookahead=none"], ": not with url; it is a setting of the server"),
        (["url=http://here", "api_key_file=/none/such"], "api_key_file=/none/such: cannot be read: No such file"),
        (["url=http://here", "output=/proc/none"], "output=/proc/none: No such file"),
    ],
)
def test_invalid_load_settings_are_refused_in_one_line(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 2.0}, "rate: only with url"),
        ({"api_key": "a"}, "api_key: only with url"),
        ({"url": "http://here", "rate": 0.0}, "rate=0.0: must be a number > 0"),
        ({"url": "http://here", "rate": 1.0, "concurrency": 2}, "concurrency=2: not with rate"),
        ({"url": "http://here", "model": ModelConfig(path="/a")}, "model.path=/a: not with url"),
        ({"url": "http://here", "gpus": 2}, "gpus=2: not with url; it is a setting of the server"),
        ({"url": "http://here", "device": "cpu"}, "device=cpu: not with url"),
        ({"url": "http://here", "lookahead": LookaheadConfig(W=9)}, "lookahead.W=9: not with url"),
        ({"url": "http://here", "api_key": "a", "api_key_file": "b"}, "api_key_file=b: not with api_key"),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else None,
)
def test_contradictory_load_settings_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        BenchConfig(**settings)
    assert str(caught.value).startswith(message)


def test_load_without_any_answer_fails(capsys, prompts):
    with fake_server(lambda number: 500) as (url, _):
        status, out, err = run(capsys, f"url={url}", "num_requests=3", f"prompts={prompts}")
    assert status == 1 and "| 3 | 3 |" in out and "no request was answered" in err.splitlines()[-1]
