"""Tests of lp-generate with a file of prompts: results, resumed runs, and outputs that it refuses."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from support.processes import PATIENCE, marked, start_cli, wait_until
from support.serving import TEMPLATE
from support.thinned import slow

from lp_runtime import LookaheadRuntime
from lp_runtime.entrypoints.cli import main
from lp_runtime.entrypoints.output_file import OutputFile
from lp_runtime.errors import ConfigError, LookaheadError

NUM_NEW = 6
FIELDS = [
    "index",
    "sample",
    "prompt",
    "text",
    "token_ids",
    "num_tokens",
    "steps",
    "compression_ratio",
    "step_tokens",
    "seconds",
    "finish_reason",
    "seed",
]


class Job:
    """A prompts file and an output file of lp-generate, with a model."""

    def __init__(self, folder, model_dir, records):
        self.model_dir = model_dir
        self.source = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.source.write_text("".join(json.dumps(record) + "\n" for record in records))

    def arguments(self, *overrides: str) -> list[str]:
        paths = [f"model.path={self.model_dir}", f"prompts={self.source}", f"output={self.output}"]
        return [*paths, f"max_new_tokens={NUM_NEW}", *overrides]

    def run(self, *overrides: str) -> list[dict]:
        main(self.arguments(*overrides))
        return self.results()

    def results(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    @property
    def settings(self):
        """The file of settings next to the output."""
        return self.output.with_name(self.output.name + ".settings")

    def continue_from(self, other: Job, output: bytes) -> None:
        """Write an output, with the settings of another job's run."""
        self.output.write_bytes(output)
        shutil.copy(other.settings, self.settings)


RECORDS = [{"prompt": [1, 2, index], "other": [1, index]} for index in range(5)]


@pytest.fixture
def job(tmp_path, tiny_model_dir):
    return Job(tmp_path, tiny_model_dir, RECORDS)


@pytest.fixture(scope="module")
def complete(tmp_path_factory, tiny_model_dir):
    """A job that was run with ids=true; `printed` has its stdout and stderr."""
    job = Job(tmp_path_factory.mktemp("complete"), tiny_model_dir, RECORDS)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        job.run("ids=true")
    job.printed = out.getvalue(), err.getvalue()
    return job


@pytest.fixture
def begun(job, complete):
    """A job like `complete` that has written its first line only."""
    job.continue_from(complete, complete.output.read_bytes().splitlines(keepends=True)[0])
    return job


@pytest.fixture
def refusal(capsys):
    """Return a function that runs a job that must be refused and returns its error line."""

    def run(job: Job, *overrides: str) -> str:
        with pytest.raises(SystemExit) as caught:
            job.run(*overrides)
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (out, len(lines)) == ("", 1)
        return lines[0]

    return run


def test_output_has_one_line_per_prompt_with_all_fields(complete):
    results = complete.results()
    assert [result["index"] for result in results] == [0, 1, 2, 3, 4]
    for result in results:
        assert list(result) == FIELDS
        assert result["prompt"] == [1, 2, result["index"]]
        assert len(result["token_ids"]) == result["num_tokens"] == NUM_NEW
        assert result["finish_reason"] == "length"
        assert 1 <= result["steps"] <= NUM_NEW
        assert result["compression_ratio"] == result["num_tokens"] / result["steps"]
        assert result["step_tokens"] >= 1
        assert result["seconds"] > 0


def test_text_prompts_are_read_from_prompt_field(tmp_path, small_demo_dir):
    job = Job(tmp_path, small_demo_dir, [{"q": "def größe(n):"}, {"q": "import"}])
    results = job.run("prompt_field=q", "eos=false")
    assert [result["prompt"] for result in results] == ["def größe(n):", "import"]
    for result in results:
        assert result["text"]
        assert result["num_tokens"] == NUM_NEW
    assert "größe" in job.output.read_text(encoding="utf-8")


@pytest.mark.slow
def test_first_of_several_turns_is_the_prompt(tmp_path, demo_model_dir):
    turns = {"question_id": 81, "category": "writing", "turns": ["def f():", "now in C"]}
    (result,) = Job(tmp_path, demo_model_dir, [turns]).run("prompt_field=turns")
    assert result["prompt"] == "def f():"


@pytest.fixture(scope="module")
def chat_dir(small_demo_dir, tmp_path_factory):
    """A model with a chat template."""
    folder = shutil.copytree(small_demo_dir, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def conversations(tmp_path, chat_dir):
    """Return a job of two conversations, the second with one turn, for a model with a chat template."""
    records = [{"turns": ["Write a loop.", "And a test."]}, {"turns": ["Write a class."]}]
    return Job(tmp_path, chat_dir, records)


@pytest.mark.slow
def test_turns_all_decodes_every_turn_and_resumes(conversations):
    settings = ["prompt_field=turns", "chat=true", "turns=all"]
    results = conversations.run(*settings)
    actual = [(result["index"], result["turn"], result["prompt"]) for result in results]
    assert actual == [(0, 0, "Write a loop."), (1, 0, "Write a class."), (0, 1, "And a test.")]
    with LookaheadRuntime(conversations.model_dir, device="cpu") as runtime:
        messages = [{"role": "user", "content": "Write a loop."}]
        for result in (results[0], results[2]):
            assert runtime.generate(messages=messages, max_new_tokens=NUM_NEW).token_ids == result["token_ids"]
            answer = {"role": "assistant", "content": result["text"]}
            messages += [answer, {"role": "user", "content": "And a test."}]
    # the output is cut off after the first turns: the run continues from the answers in it
    lines = conversations.output.read_text().splitlines(keepends=True)
    conversations.output.write_text("".join(lines[:2]) + lines[2][:9])
    resumed = conversations.run(*settings)
    assert resumed[:2] == results[:2] and resumed[2]["token_ids"] == results[2]["token_ids"]


def test_reasoning_is_left_out_of_the_next_turn(conversations, tmp_path):
    conversations.model_dir = shutil.copytree(conversations.model_dir, tmp_path / "thinking")
    template = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]") + "<think>\n"
    (conversations.model_dir / "chat_template.jinja").write_text(template)
    results = conversations.run("prompt_field=turns", "chat=true", "turns=all")
    messages = [{"role": "user", "content": "Write a loop."}]
    for result in (results[0], results[2]):
        with LookaheadRuntime(conversations.model_dir, device="cpu") as runtime:
            out = runtime.generate(messages=messages, max_new_tokens=NUM_NEW)
        assert (out.token_ids, out.message) == (result["token_ids"], result["message"])
        assert result["message"]["content"] == "" and result["message"]["reasoning_content"]
        messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": "And a test."}]


@pytest.mark.slow
def test_chat_applies_the_template_to_the_first_turn(conversations):
    results = conversations.run("prompt_field=turns", "chat=true")
    assert ["turn" in result for result in results] == [False, False]
    with LookaheadRuntime(conversations.model_dir, device="cpu") as runtime:
        messages = [{"role": "user", "content": "Write a class."}]
        assert runtime.generate(messages=messages, max_new_tokens=NUM_NEW).token_ids == results[1]["token_ids"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["turns=all"], "turns=all: only with chat=true"),
        (["turns=some", "chat=true"], "turns=some: must be one of first, all"),
        (["ids=true", "chat=true"], "chat=true: not with ids=true"),
        (["chat=true", "turns=all"], "turns=all: field 'q' of"),
        (["chat=true", "prompt_field=mixed"], "line 2: field 'mixed' must hold text, as line 1's does"),
    ],
)
def test_bad_chat_and_turns_settings_are_refused(tmp_path, chat_dir, refusal, settings, message):
    records = [{"q": "a", "mixed": "a"}, {"q": "b", "mixed": ["a", "b"]}]
    job = Job(tmp_path, chat_dir, records)
    assert message in refusal(job, "prompt_field=q", *settings)
    assert not job.output.exists()


def test_model_without_chat_template_is_refused(tmp_path, refusal, demo_model_dir):
    job = Job(tmp_path, demo_model_dir, [{"prompt": "a"}])
    assert refusal(job, "chat=true").endswith(f"chat=true: the model {demo_model_dir} has no chat template")


def test_turn_that_exceeds_the_context_is_named(conversations, refusal):
    long = {"turns": ["Write.", "x = 1\n" * 3000, "And now?"]}
    other = {"turns": ["Write.", "And a test."]}
    conversations.source.write_text("".join(json.dumps(each) + "\n" for each in (long, other)))
    line = refusal(conversations, "prompt_field=turns", "chat=true", "turns=all")
    assert "line 1, turn 2: the prompt is too long" in line and line.endswith("; all others were decoded")
    done = [(each["index"], each["turn"]) for each in conversations.results()]
    assert done == [(0, 0), (1, 0), (1, 1)], "the other conversation goes on"


def test_turns_of_a_conversation_have_different_seeds(conversations):
    settings = ["prompt_field=turns", "chat=true", "turns=all", "sampling.temperature=1", "sampling.seed=7"]
    seeds = {(each["index"], each["turn"]): each["seed"] for each in conversations.run(*settings)}
    assert seeds == {(0, 0): 7, (1, 0): 8, (0, 1): 7 + (1 << 32)}


@pytest.mark.slow
def test_standard_output_may_be_a_file_that_has_content(tmp_path, complete):
    log = tmp_path / "log"
    log.write_text("begins\n")
    command = [sys.executable, "-m", "lp_runtime", f"model.path={complete.model_dir}", f"prompts={complete.source}"]
    with log.open("a") as opened:
        done = subprocess.run(
            [*command, "output=/dev/stdout", "ids=true", f"max_new_tokens={NUM_NEW}"], stdout=opened, check=False
        )
    first, *lines = log.read_text().splitlines()
    assert done.returncode == 0 and first == "begins"
    assert [json.loads(line)["token_ids"] for line in lines] == [each["token_ids"] for each in complete.results()]


def test_blank_lines_do_not_count_and_lines_beyond_the_limit_are_not_read(job):
    job.source.write_text("\n" + job.source.read_text().replace("\n", "\n\n") + "not JSON\n")
    assert [result["index"] for result in job.run("ids=true", "limit=5")] == [0, 1, 2, 3, 4]


def test_run_without_limit_continues_a_limited_run(job):
    first = job.run("ids=true", "limit=2")
    assert [result["index"] for result in first] == [0, 1]
    more = job.run("ids=true")
    assert more[:2] == first
    assert [result["index"] for result in more] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("limit", [5, 2])
def test_finished_output_is_left_unchanged(job, complete, limit):
    before = complete.output.read_bytes()
    job.continue_from(complete, before)
    job.run("ids=true", f"limit={limit}")
    assert job.output.read_bytes() == before


@pytest.mark.parametrize("policy", slow([None, "throughput", "fair"], [None, "fair"]))
def test_two_replicas_give_the_same_lines(job, complete, policy):
    """With a policy other than the default, replicas decode several prompts at once."""
    expected = [(line["index"], line["token_ids"]) for line in complete.results()]
    actual = job.run("ids=true", "gpus=2", *([f"policy={policy}"] if policy else []))
    assert [(line["index"], line["token_ids"]) for line in actual] == expected


@pytest.mark.parametrize("cut", [1, 60])  # without its newline only, and within its JSON
def test_run_resumes_after_a_truncated_line(job, complete, cut):
    whole = complete.results()
    lines = complete.output.read_bytes().splitlines(keepends=True)
    job.continue_from(complete, b"".join(lines[:3]) + lines[3][:-cut])
    again = job.run("ids=true")
    assert again[:3] == whole[:3]
    assert [result["index"] for result in again] == [0, 1, 2, 3, 4]
    assert [result["token_ids"] for result in again] == [result["token_ids"] for result in whole]


def test_resume_fills_gaps(job, complete):
    whole = complete.results()
    lines = complete.output.read_bytes().splitlines(keepends=True)
    job.continue_from(complete, lines[0] + lines[4])
    again = job.run("ids=true")
    assert [result["index"] for result in again] == [0, 4, 1, 2, 3]
    assert {r["index"]: r["token_ids"] for r in again} == {r["index"]: r["token_ids"] for r in whole}


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2])
def test_run_resumes_after_the_process_was_killed(tmp_path, demo_model_dir, gpus):
    job = Job(tmp_path, demo_model_dir, [{"prompt": [40 + index, 50, 60]} for index in range(8)])
    overrides = ["ids=true", "eos=false", "max_new_tokens=200", f"gpus={gpus}"]
    with marked() as mark:
        driver = start_cli(*job.arguments(*overrides), cwd=tmp_path, environment=mark.environment)
        wait_until(lambda: driver.poll() is not None or (job.output.exists() and job.output.read_bytes().count(b"\n")))
        driver.send_signal(signal.SIGKILL)
        _, err = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == -signal.SIGKILL, err.decode()
        mark.assert_gone()
    before = job.output.read_bytes()
    kept = before[: before.rindex(b"\n") + 1]
    assert 1 <= kept.count(b"\n") < 8
    results = job.run(*overrides)
    assert job.output.read_bytes().startswith(kept)
    assert [result["index"] for result in results] == list(range(8))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        pytest.param("max_new_tokens=13", "max_new_tokens", marks=pytest.mark.slow),
        ("lookahead.W=3", "lookahead"),
        pytest.param("gpus=2", "gpus", marks=pytest.mark.slow),
        pytest.param("eos=false", "eos", marks=pytest.mark.slow),
        pytest.param("dtype=bfloat16", "dtype", marks=pytest.mark.slow),
        pytest.param("prompt_field=other", "prompt_field", marks=pytest.mark.slow),
    ],
)
def test_changed_settings_are_refused(begun, refusal, override, key):
    before = begun.output.read_bytes()
    message = refusal(begun, "ids=true", override)
    assert f"output={begun.output}: holds results of other settings ({key} was " in message
    assert begun.output.read_bytes() == before


def test_setting_that_is_no_longer_given_is_refused(begun, refusal):
    old = json.loads(begun.settings.read_text())
    begun.settings.write_text(json.dumps(old | {"constraint": "of another run"}))
    assert '(constraint was "of another run", is null)' in refusal(begun, "ids=true")


def test_setting_unknown_to_an_older_output_has_its_default(begun, refusal):
    old = json.loads(begun.settings.read_text())
    del old["loading"]["use_safetensors"], old["lookahead"]["prior"], old["turns"]
    begun.settings.write_text(json.dumps(old))
    assert "(loading was " in refusal(begun, "ids=true", "model.use_safetensors=false")
    assert len(begun.run("ids=true")) == 5


@pytest.mark.slow
def test_fewer_ranks_continue_only_after_a_torchrun_restart(begun, refusal, monkeypatch):
    begun.settings.write_text(begun.settings.read_text().replace('"gpus": 1', '"gpus": 2'))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    assert "(gpus was 2, is 1)" in refusal(begun, "ids=true")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert len(begun.run("ids=true")) == 5


def test_changed_prompts_are_refused(begun, refusal):
    before = begun.output.read_bytes()
    begun.source.write_text(begun.source.read_text().replace("[1, 2, 4]", "[1, 2, 5]"))
    assert "(prompts was " in refusal(begun, "ids=true")
    assert begun.output.read_bytes() == before


@pytest.mark.slow
def test_changed_model_is_refused(begun, refusal, make_model_dir):
    begun.model_dir = make_model_dir(seed=1)
    assert "(model was " in refusal(begun, "ids=true")


@pytest.mark.parametrize("text", ["my notes\n", '{"index": 0}\n', "no newline"])
def test_foreign_output_is_refused_and_unchanged(job, refusal, text):
    job.output.write_text(text)
    assert "was not written by lp-generate; choose another output" in refusal(job, "ids=true")
    assert job.output.read_text() == text
    assert sorted(path.name for path in job.output.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_prompts_file_as_output_is_refused(job, refusal):
    job.output = job.source
    before = job.source.read_bytes()
    assert "was not written by lp-generate" in refusal(job, "ids=true")
    assert job.source.read_bytes() == before


def test_damaged_output_is_refused_and_unchanged(begun, refusal):
    job, text = begun, "damaged\n" + begun.output.read_text()
    job.output.write_text(text)
    assert f"output={job.output} line 1: is not a result of lp-generate" in refusal(job, "ids=true")
    assert job.output.read_text() == text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 251, "line 6: the prompt is too long: 251 tokens + max_new_tokens=6 are more than"),
        ([64], "line 6: token id 64 of the prompt: must be an integer 0 to 63"),
        ([], "line 6: the prompt is empty"),
    ],
)
def test_bad_prompt_is_named_before_any_is_decoded(job, refusal, prompt, message):
    with job.source.open("a") as file:
        file.write(json.dumps({"prompt": prompt}) + "\n")
    assert message in refusal(job, "ids=true")
    assert not job.output.exists()


def test_progress_is_shown_in_lines_if_stderr_is_no_terminal(complete):
    out, err = complete.printed
    assert out == "" and "\r" not in err
    shown = [re.fullmatch(r"(\d)/5 prompts, [\d.]+ tokens/s, S [\d.]+", line) for line in err.splitlines()]
    numbers = [match[1] for match in shown if match]
    assert (numbers[0], numbers[-1]) == ("1", "5")


def test_output_that_another_run_is_writing_is_refused_and_unchanged(begun, refusal):
    """The other run's line is incomplete: it is not removed."""
    with begun.output.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        print('{"index": 1, "te', end="", file=other, flush=True)
        before = begun.output.read_text()
        assert refusal(begun, "ids=true") == f"error: output={begun.output}: another lp-generate is writing it"
        assert begun.output.read_text() == before
    assert [result["index"] for result in begun.run("ids=true")] == list(range(5))


def test_output_is_locked_until_its_run_ends(tmp_path):
    first, second = (OutputFile(tmp_path / "out", {}, None) for _ in range(2))
    first.resume()
    with first, pytest.raises(ConfigError, match="another lp-generate is writing it"):
        second.resume()
    second.resume()
    with second:
        second.write({"text": "a"})


def test_full_disk_raises_one_error(tmp_path):
    (tmp_path / "out").symlink_to("/dev/full")
    output = OutputFile(tmp_path / "out", {}, None)
    output.resume()
    message = f"output={tmp_path}/out: writing failed: No space left on device"
    with pytest.raises(LookaheadError, match=message), output:  # leaving the context raises no other error
        output.write({"index": 0})


def test_pipe_that_has_lost_its_reader_ends_the_command_silently(tmp_path):
    """cli.py ends the process without a message after a BrokenPipeError; this is `output=/dev/stdout | head`."""
    os.mkfifo(tmp_path / "out")
    reader = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    output = OutputFile(tmp_path / "out", {}, None)
    output.resume()
    os.close(reader)
    with pytest.raises(BrokenPipeError), output:
        output.write({"index": 0})


def test_unwritable_output_is_refused_before_replicas_start(job, refusal, monkeypatch):
    monkeypatch.setattr("lp_runtime.entrypoints.commands.LookaheadRuntime", None)
    job.output.mkdir()
    assert "cannot be written: is a directory" in refusal(job, "ids=true")


@pytest.mark.slow
def test_samples_are_resumed_with_the_seed_of_the_first_run(job):
    sampling = ("ids=true", "sampling.temperature=1.0", "num_samples=2", "logprobs=true", "sampling.logit_bias={4:1}")
    job.run(*sampling, "limit=2")
    first = job.output.read_text()
    results = [json.loads(line) for line in first.splitlines()]
    assert [(result["index"], result["sample"]) for result in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(len(result["logprobs"]) == result["num_tokens"] for result in results)
    seed = results[0]["seed"]
    assert [result["seed"] for result in results] == [seed, seed, seed + 1, seed + 1]
    assert results[0]["token_ids"] != results[1]["token_ids"]
    job.run(*sampling)
    assert job.output.read_text().startswith(first)
    again = [json.loads(line) for line in job.output.read_text().splitlines()]
    assert {result["seed"] - result["index"] for result in again} == {seed}
    assert len(again) == 10


def test_several_samples_of_greedy_decoding_are_refused(job, refusal):
    assert "num_samples=2: decoding is greedy; give sampling.temperature > 0" in refusal(
        job, "ids=true", "num_samples=2"
    )


def test_pipe_as_output_gets_all_results_and_no_settings_file(job):
    """A pipe as the output is not resumed or synced, and gets no settings file.

    This is the case of `output=/dev/stdout | cat`.
    """
    os.mkfifo(job.output)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(job.output.read_text().splitlines()), daemon=True)
    reader.start()
    main(job.arguments("ids=true"))
    reader.join()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2, 3, 4]
    assert {path.name for path in job.output.parent.iterdir()} == {"in.jsonl", "out.jsonl"}
