"""Tests of lp-chat: streamed conversations, stopped answers, and models without a chat template."""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys

import pytest
from support.forked import run_forked
from support.processes import PATIENCE, marked

from lp_runtime import LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.entrypoints.chat import HELP, converse
from lp_runtime.entrypoints.cli import chat_main

CHAT = "from lp_runtime.entrypoints.cli import chat_main; chat_main()"
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
THINKING = TEMPLATE.replace("# assistant:", "# assistant:<think>\n").replace(
    "m.content", "m.content.split('</think>')[-1]"
)


@pytest.fixture(scope="module")
def chat_dir(small_demo_dir, tmp_path_factory):
    """A model with a chat template."""
    folder = shutil.copytree(small_demo_dir, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run_chat(folder, lines: str, *overrides: str, cwd) -> subprocess.CompletedProcess:
    with marked() as mark:
        result = subprocess.run(
            [sys.executable, "-c", CHAT, f"model.path={folder}", "max_new_tokens=12", *overrides],
            input=lines,
            capture_output=True,
            text=True,
            cwd=cwd,
            env=mark.environment,
            timeout=PATIENCE,
        )
        mark.assert_gone()
    return result


def test_reasoning_goes_to_stderr_and_not_into_the_conversation(small_demo_dir, tmp_path):
    """The template begins the answer's reasoning part, which the few tokens do not end."""
    folder = shutil.copytree(small_demo_dir, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(THINKING)
    arguments = [f"model.path={folder}", "max_new_tokens=6"]
    result = run_forked(chat_main, arguments, cwd=tmp_path, text="Write a loop.\nAnd a test.\n")
    assert (result.returncode, result.stdout) == (0, "")
    messages = [{"role": "user", "content": "Write a loop."}]
    with LookaheadRuntime(folder, device="cpu", dtype="float32", lookahead=PLAIN) as runtime:
        first = runtime.generate(messages=messages, max_new_tokens=6).message
        messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": "And a test."}]
        second = runtime.generate(messages=messages, max_new_tokens=6).message
    assert first["content"] == "" and first["reasoning_content"]
    cut = "(the answer was cut at its limit; a higher max_new_tokens allows more)\n"
    assert result.stderr.endswith(f"{first['reasoning_content']}\n{cut}{second['reasoning_content']}\n{cut}")


def test_unknown_command_is_no_message(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/rest\n/etc/hosts\n/why is it red?\n"))
    asked = []

    def answer(messages) -> str:
        asked.append(messages[-1]["content"])
        return "yes"

    converse(None, answer)
    assert asked == ["/etc/hosts", "/why is it red?"]
    assert capsys.readouterr().err.splitlines()[1:] == [f"error: /rest is no command: {HELP}"]


@pytest.mark.parametrize("how", ["forked", pytest.param("started", marks=pytest.mark.slow)])
def test_chat_remembers_undoes_and_resets_turns(chat_dir, tmp_path, how):
    lines = "Write a loop.\n\nAnd a test.\n/undo\nAnd a class.\n/reset\n/help\nWrite a loop.\n/quit\nnever read\n"
    if how == "started":
        result = run_chat(chat_dir, lines, "system=Be brief.", "max_new_tokens=6", cwd=tmp_path)
    else:
        arguments = [f"model.path={chat_dir}", "max_new_tokens=6", "system=Be brief."]
        result = run_forked(chat_main, arguments, cwd=tmp_path, text=lines)
    assert result.returncode == 0, result.stderr
    with LookaheadRuntime(chat_dir, device="cpu", dtype="float32", lookahead=PLAIN) as runtime:

        def answer(*turns: str) -> str:
            roles = ["system", *["user", "assistant"] * len(turns)]
            messages = [
                {"role": role, "content": text} for role, text in zip(roles, ["Be brief.", *turns], strict=False)
            ]
            return runtime.generate(messages=messages, max_new_tokens=6).text

        first = answer("Write a loop.")
        expected = [
            first,
            answer("Write a loop.", first, "And a test."),
            answer("Write a loop.", first, "And a class."),
            first,
        ]
    assert result.stdout == "".join(f"{text}\n" for text in expected)


@pytest.mark.slow
def test_too_long_chat_reports_an_error_and_continues(chat_dir, tmp_path):
    result = run_chat(chat_dir, "x " * 5000 + "\nhello\n", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "error: the prompt is too long" in result.stderr
    assert "(/reset starts again)" in result.stderr
    assert len(result.stdout.splitlines()) >= 1


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_chat(chat_dir, tmp_path):
    with marked() as mark:
        process = subprocess.Popen(
            [sys.executable, "-c", CHAT, f"model.path={chat_dir}", "max_new_tokens=3000", "gpus=2"],
            cwd=tmp_path,
            env=mark.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        process.stdin.write(b"Write a very long loop.\n")
        process.stdin.flush()
        assert process.stdout.read(20)  # it is answering
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/quit\n")
        process.stdin.flush()
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        mark.assert_gone()


def test_model_without_chat_template_is_refused(demo_model_dir, capsys):
    with pytest.raises(SystemExit) as caught:
        chat_main([f"model.path={demo_model_dir}", "gpus=2"])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: messages: the model has no chat template; give a prompt instead\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("promt=x", "unknown setting promt=x: see --help"),
        ("prompt=x", "unknown setting prompt=x"),
        ("max_new_tokens=0", "max_new_tokens=0: must be an integer >= 1"),
    ],
)
def test_bad_settings_are_refused(override, message, capsys):
    with pytest.raises(SystemExit) as caught:
        chat_main([override])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
