"""Tests that the command line refuses bad machines, models, prompts and files in one line."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from support.thinned import thinned

from lp_runtime.distributed import devices
from lp_runtime.entrypoints import commands
from lp_runtime.replica import process_start
from lp_runtime.utils.limits import MORE_PROCESSES

pytestmark = pytest.mark.usefixtures("own_folder")
IDS = "prompt=[1,2,3]"


@pytest.fixture
def prompts(tmp_path):
    """Return a function that writes a prompts file and returns overrides for it and an output next to it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        return [f"prompts={path}", f"output={tmp_path / 'out.jsonl'}"]

    return write


# Machines, models and prompts


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


def test_limit_of_processes_is_one_line(refusal, tiny_model_dir, monkeypatch):
    def refuse(pipe):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(process_start, "start_process", refuse)
    message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", "device=cpu", "gpus=2")
    assert message == f"a replica's process cannot be started: {os.strerror(errno.EAGAIN)}; {MORE_PROCESSES}"


def test_limit_of_threads_is_one_line(refusal, tiny_model_dir, monkeypatch):
    def refuse(config, is_leader):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(commands, "run_command", refuse)
    message = refusal(f"model.path={tiny_model_dir}", IDS, "ids=true", "device=cpu")
    assert message == f"can't start new thread: {MORE_PROCESSES}"


@pytest.mark.parametrize("gpus", [1, 2])
def test_missing_model_directory_is_refused(refusal, tmp_path, gpus):
    path = tmp_path / "nowhere"
    assert refusal(f"model.path={path}", "prompt=x", f"gpus={gpus}") == f"model.path={path}: no such directory"


def test_model_directory_without_config_is_refused(refusal, tmp_path):
    message = refusal(f"model.path={tmp_path}", "prompt=x")
    assert message == f"model.path={tmp_path}: the directory has no config.json"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "nonsense"}'])
def test_broken_model_config_is_refused(refusal, model_copy, text):
    (model_copy / "config.json").write_text(text)
    assert refusal(f"model.path={model_copy}", IDS, "ids=true").startswith(f"model.path={model_copy}: cannot be loaded")


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


# Files


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


def test_deleted_working_directory_is_refused(refusal, tmp_path, monkeypatch):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert refusal("prompt=hello") == "the working directory has been deleted: change to one that exists"
