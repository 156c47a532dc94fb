"""Tests of runs of the command line: launchers, output, interruption, and no leftover processes."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys

import pytest
from support.processes import PATIENCE, command_line, marked, run_cli, start_cli, wait_until

from lp_runtime.entrypoints.cli import main

pytestmark = pytest.mark.usefixtures("own_folder")
IDS = "prompt=[1,2,3]"


# Launchers


def test_non_numeric_torchrun_variable_is_refused(refusal, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "abc" if name == "WORLD_SIZE" else "1")
    assert (
        refusal("prompt=x", "launcher=torchrun")
        == "launcher=torchrun: WORLD_SIZE=abc: must be a number from 1 to 1000000"
    )


def test_torchrun_launcher_without_torchrun_is_refused(refusal, tiny_model_dir):
    message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", "launcher=torchrun")
    assert message.startswith("launcher=torchrun: RANK is not set; start with 'torchrun")


def test_port_in_use_is_refused(refusal, tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        overrides = ["gpus=2", "launcher.backend=gloo", f"launcher.port={port}"]
        message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", *overrides)
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")


def test_run_succeeds_with_a_given_launcher_port(capsys, tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    overrides = ["gpus=2", "launcher.backend=gloo", f"launcher.port={port}"]
    main([f"model.path={tiny_model_dir}", IDS, "ids=true", *overrides, "max_new_tokens=3"])
    assert "2 replicas" in capsys.readouterr().err


def test_start_timeout_names_the_rank_that_is_not_ready(refusal, tiny_model_dir):
    message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", "gpus=2", "launcher.start_timeout=0.01")
    assert message == "rank 0 was not ready within launcher.start_timeout=0.01 seconds"


@pytest.mark.slow
def test_unreachable_ray_cluster_is_refused(tiny_model_dir, own_folder):
    pytest.importorskip("ray")
    with marked() as mark:
        arguments = (f"model.path={tiny_model_dir}", IDS, "ids=true", "launcher=ray", "launcher.address=127.0.0.1:1")
        result = run_cli(*arguments, cwd=own_folder, environment=mark.environment)
        assert result.returncode == 2
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0] == "error: launcher=ray: no Ray cluster at launcher.address=127.0.0.1:1: Connection refused"
        mark.assert_gone()


# Runs


@pytest.mark.slow
def test_refusal_exits_with_status_2_and_one_line(own_folder):
    result = run_cli("prompt=x", "lookahead.N=1", cwd=own_folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: lookahead.N=1: must be an integer >= 2\n"


@pytest.mark.slow
def test_rank_that_fails_at_start_leaves_no_process(own_folder, model_copy):
    (model_copy / "model.safetensors").write_bytes(b"not weights")
    with marked() as mark:
        arguments = (f"model.path={model_copy}", IDS, "ids=true", "gpus=3")
        result = run_cli(*arguments, cwd=own_folder, environment=mark.environment)
        assert (result.returncode, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1, result.stderr
        mark.assert_gone()


def test_text_is_on_stdout_and_summary_on_stderr(capsys, small_demo_dir):
    main([f"model.path={small_demo_dir}", "prompt=def fib(n):", "max_new_tokens=16", "eos=false", "compare=true"])
    out, err = capsys.readouterr()
    assert out.startswith("def fib(n):")
    assert len(out) > len("def fib(n):\n") + 10
    for word in ("tokens", "steps", "compression ratio", "tokens/s", "one token a step", "the same tokens: yes"):
        assert word in err
    assert "not captured" not in err  # nothing is captured on a CPU


@pytest.fixture
def endless(demo_model_dir):
    """Return overrides of a run that takes long enough to be interrupted."""
    return [f"model.path={demo_model_dir}", "prompt=def f():", "gpus=2", "max_new_tokens=4000", "eos=false"]


@pytest.mark.slow
def test_ctrl_c_ends_every_process(own_folder, endless):
    with marked() as mark:
        driver = start_cli(*endless, cwd=own_folder, environment=mark.environment)
        read_new_text(driver)
        assert len(mark.workers()) == 2
        driver.send_signal(signal.SIGINT)
        _, err = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 130
        assert err.decode() == "\ninterrupted\n" or err.decode() == "interrupted\n"
        mark.assert_gone()


@pytest.mark.slow
def test_ctrl_c_ends_replicas_that_are_starting(own_folder, endless):
    with marked() as mark:
        driver = start_cli(*endless, cwd=own_folder, environment=mark.environment)
        wait_until(lambda: len(mark.workers()) == 2)
        driver.send_signal(signal.SIGINT)
        _, err = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 130
        assert "Traceback" not in err.decode()
        mark.assert_gone()


@pytest.mark.slow
def test_replicas_end_when_the_driver_is_killed(own_folder, endless):
    with marked() as mark:
        driver = start_cli(*endless, cwd=own_folder, environment=mark.environment)
        read_new_text(driver)
        assert len(mark.workers()) == 2
        driver.kill()
        driver.communicate(timeout=PATIENCE)
        mark.assert_gone()


def read_new_text(driver) -> None:
    """Wait until the driver has printed more than the prompt."""
    seen = b""
    while len(seen) < len(b"def f():") + 5:
        piece = os.read(driver.stdout.fileno(), 4096)
        assert piece, driver.communicate()[1].decode()
        seen += piece


@pytest.mark.slow
def test_closed_stdout_ends_the_run_without_a_traceback(tiny_model_dir, tmp_path):
    with marked() as mark:
        process = start_cli(
            f"model.path={tiny_model_dir}",
            IDS,
            "ids=true",
            "max_new_tokens=200",
            "eos=false",
            "gpus=2",
            cwd=tmp_path,
            environment=mark.environment,
        )
        process.stdout.close()
        _, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (1, b"")
        mark.assert_gone()


def test_full_disk_on_stdout_is_reported_in_one_line(tmp_path):
    with marked() as mark, open("/dev/full", "w") as full:
        options = {"cwd": tmp_path, "env": mark.environment, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run([sys.executable, "-m", "lp_runtime", "--cfg", "prompt=x"], stdout=full, **options)
        assert (done.returncode, done.stderr) == (1, "error: stdout: cannot be written: No space left on device\n")


def test_unencodable_characters_on_stdout_become_question_marks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    main(["--cfg", "prompt=d\u00e9"])
    assert b"prompt: d?" in written.getvalue()


def test_ids_are_printed_without_a_tokenizer(capsys, tiny_model_dir):
    main([f"model.path={tiny_model_dir}", IDS, "ids=true", "max_new_tokens=3"])
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.slow
def test_logit_bias_is_applied_and_bad_values_are_refused(refusal, capsys, tiny_model_dir):
    biased = [f"model.path={tiny_model_dir}", IDS, "ids=true", "max_new_tokens=3"]
    main([*biased, "sampling.logit_bias={4: 200.0, 5:1}"])
    main([*biased, 'sampling.logit_bias={"4":200}'])
    assert capsys.readouterr().out == "4 4 4 \n" * 2
    for value in ("abc", "5", "[1]", "{4}", "{x:1}"):
        message = refusal(*biased, f"sampling.logit_bias={value}")
        assert message == f"sampling.logit_bias={value}: must be {{TOKEN_ID: BIAS, ...}}"
    assert refusal(*biased, "sampling.logit_bias={64:1}").startswith("token id 64 in sampling.logit_bias: must be")


@pytest.mark.slow
def test_disabled_numba_jit_is_refused(own_folder):
    done = run_cli("prompt=hello", cwd=own_folder, environment=os.environ | {"NUMBA_DISABLE_JIT": "1"})
    assert done.returncode == 2
    assert done.stderr == "error: NUMBA_DISABLE_JIT=1: must be unset; a step would take seconds without compiled code\n"


def test_interpreter_without_docstrings_is_refused(own_folder):
    done = run_cli("prompt=hello", cwd=own_folder, environment=os.environ | {"PYTHONOPTIMIZE": "2"})
    what = "must be off; transformers does not work without docstrings"
    assert (done.returncode, done.stderr) == (2, f"error: PYTHONOPTIMIZE=2, or python -OO: {what}\n")


@pytest.mark.slow
def test_compile_process_runs_only_with_an_empty_cache(own_folder, tiny_model_dir, tmp_path):
    command = [f"model.path={tiny_model_dir}", "ids=true", IDS]
    with marked(NUMBA_CACHE_DIR=str(tmp_path / "numba")) as mark:
        driver = start_cli(*command, cwd=own_folder, environment=mark.environment)
        wait_until(lambda: any("compile_ahead" in command_line(pid) for pid in mark.alive()))
        first, _ = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 0
        mark.assert_gone()
        driver = start_cli(*command, cwd=own_folder, environment=mark.environment)
        while driver.poll() is None:
            assert not any("compile_ahead" in command_line(pid) for pid in mark.alive())
        again, errors = driver.communicate()
        assert again == first and b"compil" not in errors
