"""Tests of the command line: composed settings, errors for bad input, and no leftover processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
from support.processes import PATIENCE, command_line, marked, run_cli, start_cli, wait_until
from support.thinned import thinned

import lp_runtime
from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.distributed import devices
from lp_runtime.entrypoints.cli import main

IDS = "prompt=[1,2,3]"


def lookahead_of(*overrides: str) -> LookaheadConfig:
    return load_config(GenerateConfig, ["prompt=x", *overrides]).lookahead


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run every test in an empty folder, which must stay empty."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def refusal(capsys):
    """Return a function that runs a command line that must be refused and returns its only error line."""

    def run(*arguments: str, status: int = 2) -> str:
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert caught.value.code == status
        assert out == ""
        assert "Traceback" not in err
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    return run


@pytest.fixture
def prompts(tmp_path):
    """Return a function that writes a prompts file and returns overrides for it and an output next to it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        return [f"prompts={path}", f"output={tmp_path / 'out.jsonl'}"]

    return write


# Composition


@pytest.mark.parametrize(
    ("preset", "setting"),
    [
        ("7b", (15, 5, 15)),
        ("13b", (10, 5, 10)),
        ("34b", (7, 5, 7)),
        ("code", (8, 6, 15)),
        ("text", (7, 5, 10)),
        ("creative", (5, 4, 8)),
        ("none", (0, 2, 0)),
    ],
)
def test_preset_sets_w_n_and_g(preset, setting):
    config = lookahead_of(f"lookahead={preset}")
    assert config == LookaheadConfig(*setting, drafter="paper" if preset == "none" else "full")


def test_jacobi_preset_has_a_window_of_two_levels_and_no_guesses():
    config = lookahead_of("lookahead=jacobi")
    assert (config.N, config.G) == (2, 0)
    assert config.W > 1


def test_single_values_override_a_preset_in_any_order():
    for overrides in (["lookahead=34b", "lookahead.N=3"], ["lookahead.N=3", "lookahead=34b"]):
        config = lookahead_of(*overrides)
        assert (config.W, config.N, config.G) == (7, 3, 7)


def test_overrides_set_the_fields_of_generate_config():
    config = load_config(
        GenerateConfig,
        [
            "model.path=/m",
            "prompts=in.jsonl",
            "prompt_field=q",
            "limit=20",
            "output=out.jsonl",
            "gpus=3",
            "device=cpu",
            "dtype=float32",
            "eos=false",
            "ids=true",
            "max_new_tokens=7",
            "launcher=ray",
            "launcher.address=1.2.3.4:5",
            "gpus_per_replica=1",
            "lookahead.pool_from_prompt=false",
        ],
    )
    assert (config.model.path, config.model.location) == ("/m", "/m")
    assert (config.prompts, config.prompt_field, config.limit, config.output) == ("in.jsonl", "q", 20, "out.jsonl")
    assert (config.gpus, config.device, config.dtype, config.gpus_per_replica) == (3, "cpu", "float32", 1)
    assert (config.eos, config.ids, config.max_new_tokens) == (False, True, 7)
    assert (config.launcher.name, config.launcher.address) == ("ray", "1.2.3.4:5")
    assert config.lookahead.pool_from_prompt is False


@pytest.mark.parametrize(
    "text",
    thinned(
        3,
        [
            "def fib(n):",
            "print('it\\'s', \"so\")",
            "x = {'a': [1, 2], \"b\": ${c}}",
            "${prompts}",
            "\\${x} \\\\${y} $",
            "a=b=c, d: e",
            "two\nlines\n",
            "  spaces around  ",
            "größer 数 🎉",
            "[1, 2, 3]",
            "null",
            "???",
            "3",
            "# comment",
            "${oc.env:HOME}",
        ],
    ),
)
def test_prompt_and_paths_are_kept_verbatim(text):
    assert load_config(GenerateConfig, [f"prompt={text}"]).prompt == text
    assert load_config(GenerateConfig, [f"prompts={text}", "output=o"]).prompts == text
    assert load_config(GenerateConfig, ["prompt=x", f"model.path={text}"]).model.path == text


def test_config_dir_adds_a_lookahead_preset(tmp_path):
    (tmp_path / "lookahead").mkdir()
    (tmp_path / "lookahead" / "mine.yaml").write_text("W: 4\nN: 3\nG: 2\n")
    config = load_config(GenerateConfig, ["prompt=x", "lookahead=mine"], config_dir=str(tmp_path)).lookahead
    assert (config.W, config.N, config.G) == (4, 3, 2)


def test_cfg_prints_the_settings_and_runs_nothing(capsys):
    main(["prompt=x", "lookahead=34b", "model.path=/nowhere", "--cfg"])
    out, err = capsys.readouterr()
    assert "W: 7" in out and "path: /nowhere" in out
    assert err == ""


# Bad settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lookahed.W=3", "unknown setting lookahed.W=3: did you mean lookahead.W?"),
        ("W=3", "unknown setting W=3: did you mean lookahead.W?"),
        ("max_tokens=3", "unknown setting max_tokens=3: did you mean max_new_tokens?"),
        ("lokahead=7b", "unknown setting lokahead=7b: did you mean lookahead?"),
        ("xyzzy=3", "unknown setting xyzzy=3: see --help"),
        ("lookahead=9b", "lookahead=9b: must be one of 13b, 34b, 7b, auto, code, creative, jacobi, none, text"),
        ("launcher=slurm", "launcher=slurm: must be one of auto, local, ray, torchrun"),
        ("model=hub", "model.path: is empty; must be a directory or a hub id"),
        ("+gpus=2", "+gpus=2: settings are written KEY=VALUE, without + or ~"),
        ("gpus", "gpus: settings are written KEY=VALUE, without + or ~"),
        ("lookahead.W=-1", "lookahead.W=-1: must be an integer >= 0"),
        ("lookahead.N=1", "lookahead.N=1: must be an integer >= 2"),
        ("lookahead.G=-1", "lookahead.G=-1: must be an integer >= 0"),
        ("lookahead.W=a", "lookahead.W=a: must be an integer >= 0"),
        ("lookahead.N=2.5", "lookahead.N=2.5: must be an integer >= 2"),
        ("lookahead.W=1,2", "lookahead.W=1,2: must be an integer >= 0"),
        ("gpus=0", "gpus=0: must be an integer >= 1"),
        ("gpus=two", "gpus=two: must be an integer >= 1"),
        ("gpus_per_replica=0", "gpus_per_replica=0: must be auto, fastest or an integer >= 1"),
        ("max_new_tokens=0", "max_new_tokens=0: must be an integer >= 1"),
        ("device=tpu", "device=tpu: must be one of auto, cpu, cuda"),
        ("dtype=int4", "dtype=int4: must be one of auto, float32, bfloat16, float16"),
        ("eos=maybe", "eos=maybe: must be true or false"),
        ("launcher.timeout=soon", "launcher.timeout=soon: must be a number of seconds > 0 and <= 1000000"),
        ("prompt=", "prompt: is empty; it must have at least one character"),
    ],
)
def test_bad_settings_are_refused(refusal, override, message):
    assert refusal("prompt=x", override) == message


def test_settings_are_accepted_after_options(capsys):
    main(["prompt=x", "--cfg", "gpus=2"])
    assert "\ngpus: 2\n" in capsys.readouterr().out


def test_last_value_of_a_repeated_key_is_used_and_named(refusal):
    assert refusal("prompt=x", "gpus=2", "gpus=x") == "gpus=x: must be an integer >= 1"


def test_unreadable_value_is_named(refusal):
    assert refusal("prompt=x", "gpus=[").startswith("gpus=[: cannot be read")


def test_missing_prompt_is_refused(refusal):
    assert refusal() == "prompt and prompts: give one of them (neither given)"


# Bad machines, models and prompts


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(refusal, tiny_model_dir):
    model = f"model.path={tiny_model_dir}"
    message = refusal(model, IDS, "ids=true", "device=cuda")
    assert "device=cuda" in message and "sees 0" in message
    assert refusal(model, IDS, "ids=true", "device=cuda", "gpus=2").startswith("gpus=2: this machine has 0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpu_that_torch_cannot_use_is_refused(refusal, tiny_model_dir, monkeypatch, tmp_path, device, gpus):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "DRIVER_CONTROL", tmp_path / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", None)
    message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", f"device={device}", f"gpus={gpus}")
    assert message.startswith(f"device={device}: torch ") and message.endswith("(on CPUs: device=cpu)")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_replicas_than_gpus_are_refused(refusal, tiny_model_dir):
    count = torch.cuda.device_count()
    message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", "device=cuda", f"gpus={count + 1}")
    assert message.startswith(f"gpus={count + 1}: this machine has {count}")


@pytest.mark.parametrize("gpus", [1, 2])
def test_missing_model_directory_is_refused(refusal, tmp_path, gpus):
    path = tmp_path / "nowhere"
    assert refusal(f"model.path={path}", "prompt=x", f"gpus={gpus}") == f"model.path={path}: no such directory"


def test_model_directory_without_config_is_refused(refusal, tmp_path):
    message = refusal(f"model.path={tmp_path}", "prompt=x")
    assert message == f"model.path={tmp_path}: the directory has no config.json"


@pytest.fixture
def model_copy(tiny_model_dir, tmp_path):
    """Return a copy of the tiny model that a test may damage."""
    return shutil.copytree(tiny_model_dir, tmp_path / "broken")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "nonsense"}'])
def test_broken_model_config_is_refused(refusal, model_copy, text):
    (model_copy / "config.json").write_text(text)
    assert refusal(f"model.path={model_copy}", IDS, "ids=true").startswith(f"model.path={model_copy}: cannot be loaded")


def test_missing_weights_are_refused(refusal, model_copy):
    (model_copy / "model.safetensors").unlink()
    assert refusal(f"model.path={model_copy}", IDS, "ids=true").startswith(f"model.path={model_copy}: cannot be loaded")


def test_truncated_weights_are_refused(refusal, model_copy):
    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert refusal(f"model.path={model_copy}", IDS, "ids=true").startswith(f"model.path={model_copy}: cannot be loaded")


@pytest.mark.parametrize(("key", "value", "what"), [("num_hidden_layers", 3, "lack"), ("hidden_size", 64, "shape")])
def test_weights_that_do_not_match_the_config_are_refused(refusal, model_copy, key, value, what):
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps(config | {key: value, "head_dim": None}))
    message = refusal(f"model.path={model_copy}", IDS, "ids=true")
    assert message.startswith(f"model.path={model_copy}: ")
    assert what in message


@pytest.mark.slow
def test_rank_that_fails_at_start_is_named_with_its_error(refusal, model_copy):
    (model_copy / "model.safetensors").write_bytes(b"not weights")
    message = refusal(f"model.path={model_copy}", IDS, "ids=true", "gpus=2")
    assert message.startswith("rank ")
    assert f"failed at start: model.path={model_copy}: cannot be loaded" in message


def test_text_prompt_without_tokenizer_is_refused(refusal, tiny_model_dir):
    assert refusal(f"model.path={tiny_model_dir}", "prompt=x").startswith(
        f"model.path={tiny_model_dir}: no usable tokenizer"
    )


def test_ids_outside_the_vocabulary_are_refused(refusal, tiny_model_dir):
    for ids, culprit in (("[1, 64]", "64"), ("[-1]", "-1")):
        message = refusal(f"model.path={tiny_model_dir}", f"prompt={ids}", "ids=true")
        assert message == f"token id {culprit} of the prompt: must be an integer 0 to 63"


@pytest.mark.parametrize("value", thinned(3, ["[]", "1 2 3", '["a"]', "[1.5]", "[true]", "{}", "hello"]))
def test_prompt_that_is_not_a_list_of_ids_is_refused(refusal, tiny_model_dir, value):
    message = refusal(f"model.path={tiny_model_dir}", f"prompt={value}", "ids=true")
    assert "must be a JSON list of token ids" in message or "the prompt is empty" in message


def test_prompt_beyond_the_context_is_refused(refusal, tiny_model_dir):
    message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", "max_new_tokens=254")
    assert message == ("the prompt is too long: 3 tokens + max_new_tokens=254 are more than the model's context of 256")


# Bad files


def test_missing_prompts_file_is_refused(refusal, tmp_path):
    message = refusal(f"prompts={tmp_path}/none.jsonl", f"output={tmp_path}/out.jsonl")
    assert message == f"prompts={tmp_path}/none.jsonl: cannot be read: No such file or directory"
    assert "Is a directory" in refusal(f"prompts={tmp_path}", f"output={tmp_path}/out.jsonl")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_prompts_file_is_refused(refusal, prompts, text):
    assert refusal(*prompts(text)).endswith("the file has no prompts")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl line 3: is not JSON"),
        ("prompt", "prompts.jsonl line 3: is not JSON"),
        ("[" * 200_000, "prompts.jsonl line 3: is not JSON"),
        ('{"text": "a"}', "prompts.jsonl line 3: has no field 'prompt' (prompt_field=); it has: text"),
        ("[1]", "prompts.jsonl line 3: has no field 'prompt'"),
        ('{"prompt": ""}', "prompts.jsonl line 3: field 'prompt' must hold text"),
        ('{"prompt": []}', "prompts.jsonl line 3: field 'prompt' must hold text"),
        ('{"prompt": 3}', "prompts.jsonl line 3: field 'prompt' must hold text"),
        ('{"prompt": [1, 2]}', "prompts.jsonl line 3: field 'prompt' must hold text"),
    ],
)
def test_bad_line_of_prompts_file_is_named(refusal, prompts, tmp_path, line, message):
    assert message in refusal(*prompts('{"prompt": "a"}\n\n' + line + "\n"))
    assert not (tmp_path / "out.jsonl").exists()


def test_pipe_as_prompts_file_is_refused(refusal, tmp_path):
    """The file must be readable twice, as the output's settings have a digest of it."""
    os.mkfifo(tmp_path / "pipe")
    message = refusal(f"prompts={tmp_path}/pipe", f"output={tmp_path}/out.jsonl")
    assert message.startswith(f"prompts={tmp_path}/pipe: must be a regular file, which can be read twice")


def test_too_long_file_names_are_refused(refusal, prompts):
    source, _ = prompts('{"prompt": "a"}\n')
    assert refusal(source, f"output={'a' * 300}") == f"output={'a' * 300}: cannot be written: File name too long"
    assert refusal("prompt=x", f"model.path=/{'a' * 300}") == f"model.path=/{'a' * 300}: File name too long"


def test_binary_prompts_file_is_refused(refusal, tmp_path):
    (tmp_path / "p").write_bytes(b"\xff\xfe\x00")
    assert refusal(f"prompts={tmp_path}/p", "output=o").startswith(f"prompts={tmp_path}/p: cannot be read")


def test_unwritable_output_is_refused(refusal, prompts, tiny_model_dir, tmp_path):
    source, _ = prompts('{"prompt": [1, 2]}\n')
    for output in (tmp_path, tmp_path / "prompts.jsonl" / "out", tmp_path / "nowhere" / "out"):
        message = refusal(f"model.path={tiny_model_dir}", source, f"output={output}", "ids=true", "max_new_tokens=2")
        assert message.startswith(f"output={output}: ")
        assert "cannot be written" in message
        assert (tmp_path / "prompts.jsonl").read_text() == '{"prompt": [1, 2]}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cwd", "prompts.jsonl"]


# Launchers that cannot start


def test_non_numeric_torchrun_variable_is_refused(refusal, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "abc" if name == "WORLD_SIZE" else "1")
    assert refusal("prompt=x", "launcher=torchrun") == "launcher=torchrun: WORLD_SIZE=abc: must be a number"


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


# Whole runs as processes


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


def test_text_is_on_stdout_and_summary_on_stderr(capsys, demo_model_dir):
    main([f"model.path={demo_model_dir}", "prompt=def fib(n):", "max_new_tokens=24", "eos=false", "compare=true"])
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


def test_full_disk_and_unencodable_characters_on_stdout_are_handled(tmp_path):
    """A full disk is reported in one line, and characters that stdout cannot encode become question marks."""
    with marked(PYTHONIOENCODING="ascii") as mark, open("/dev/full", "w") as full:
        options = {"cwd": tmp_path, "env": mark.environment, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "lp_runtime", "--cfg"]
        done = subprocess.run([*command, "prompt=x"], stdout=full, **options)
        assert (done.returncode, done.stderr) == (1, "error: stdout: cannot be written: No space left on device\n")
        done = subprocess.run([*command, "prompt=d\u00e9"], stdout=subprocess.PIPE, **options)
        assert (done.returncode, done.stderr) == (0, "") and "prompt: d?" in done.stdout


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


def test_stop_accepts_a_string_or_a_json_list(refusal):
    def stop(value: str) -> list[str]:
        return load_config(GenerateConfig, ["prompt=x", f"stop={value}"]).stop

    assert stop("a b: c") == ["a b: c"]
    assert stop('["\\n\\n", "x"]') == ["\n\n", "x"]
    assert refusal("prompt=x", "stop=[1").startswith("stop=[1: must be a string or a JSON list of strings")
    assert refusal("prompt=x", "stop=") == "stop='': must be strings of at least one character"


def test_version_option_prints_the_versions(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert f"lp_runtime {lp_runtime.__version__}, torch {torch.__version__}" in capsys.readouterr().out


def test_deleted_working_directory_is_refused(refusal, tmp_path, monkeypatch):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert refusal("prompt=hello") == "the working directory has been deleted: change to one that exists"


@pytest.mark.slow
def test_disabled_numba_jit_is_refused(own_folder):
    done = run_cli("prompt=hello", cwd=own_folder, environment=os.environ | {"NUMBA_DISABLE_JIT": "1"})
    assert done.returncode == 2
    assert done.stderr == "error: NUMBA_DISABLE_JIT=1: must be unset; a step would take seconds without compiled code\n"


@pytest.mark.slow
def test_compile_process_runs_only_with_an_empty_cache(own_folder, tiny_model_dir, tmp_path):
    with marked(NUMBA_CACHE_DIR=str(tmp_path / "numba")) as mark:
        driver = start_cli(
            f"model.path={tiny_model_dir}", "ids=true", IDS, cwd=own_folder, environment=mark.environment
        )
        wait_until(lambda: any("compile_ahead" in command_line(pid) for pid in mark.alive()))
        driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 0
        mark.assert_gone()
        driver = start_cli(
            f"model.path={tiny_model_dir}", "ids=true", IDS, cwd=own_folder, environment=mark.environment
        )
        while driver.poll() is None:
            assert not any("compile_ahead" in command_line(pid) for pid in mark.alive())
        driver.communicate()
