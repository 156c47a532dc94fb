"""Tests of the command line's settings: how they are composed, and which are refused."""

from __future__ import annotations

import errno
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.thinned import thinned

import lp_runtime
from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.entrypoints import cli
from lp_runtime.entrypoints.cli import main
from lp_runtime.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_folder")


def lookahead_of(*overrides: str) -> LookaheadConfig:
    return load_config(GenerateConfig, ["prompt=x", *overrides]).lookahead


# Composition


def test_presets_set_w_n_and_g():
    expected = {
        "7b": (15, 5, 15),
        "13b": (10, 5, 10),
        "34b": (7, 5, 7),
        "none": (0, 2, 0),
        "jacobi": (15, 2, 0),
        "auto": (None, None, None),
    }
    folder = Path(__file__).parents[2] / "conf" / "lookahead"
    presets = {file.stem: LookaheadConfig(**(yaml.safe_load(file.read_text()) or {})) for file in folder.iterdir()}
    assert {name: (each.W, each.N, each.G) for name, each in presets.items()} == expected
    assert {name for name, each in presets.items() if each.drafter == "paper"} == {"none", "jacobi"}
    for name in ("7b", "none"):
        assert lookahead_of(f"lookahead={name}") == presets[name]


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
    folder = tmp_path / "it's (my) größe"
    (folder / "lookahead").mkdir(parents=True)
    (folder / "lookahead" / "mine.yaml").write_text("W: 4\nN: 3\nG: 2\n")
    config = load_config(GenerateConfig, ["prompt=x", "lookahead=mine"], config_dir=str(folder)).lookahead
    assert (config.W, config.N, config.G) == (4, 3, 2)
    with pytest.raises(ConfigError, match="--config-dir /nowhere: no such folder"):
        load_config(GenerateConfig, ["prompt=x"], config_dir="/nowhere")


def test_cfg_prints_the_settings_and_runs_nothing(capsys):
    main(["prompt=x", "lookahead=34b", "model.path=/nowhere", "--cfg"])
    out, err = capsys.readouterr()
    assert "W: 7" in out and "path: /nowhere" in out
    assert err == ""


def test_stop_accepts_a_string_or_a_json_list(refusal):
    def stop(value: str) -> list[str]:
        return load_config(GenerateConfig, ["prompt=x", f"stop={value}"]).stop

    assert stop("a b: c") == ["a b: c"]
    assert stop('["\\n\\n", "x"]') == ["\n\n", "x"]
    assert refusal("prompt=x", "stop=[1").startswith("stop=[1: must be a string or a JSON list of strings")
    assert refusal("prompt=x", "stop=") == "stop='': must be strings of at least one character"


@pytest.mark.parametrize(
    ("command", "about"),
    [(cli.serve_main, "Serve a model over HTTP"), (cli.doctor_main, "Check what this machine lacks")],
)
def test_help_begins_with_the_purpose_of_the_command(capsys, command, about):
    with pytest.raises(SystemExit) as end:
        command(["--help"])
    assert end.value.code == 0
    assert about in capsys.readouterr().out


def test_version_option_prints_the_versions(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert f"lp_runtime {lp_runtime.__version__}, torch {version('torch')}" in capsys.readouterr().out


# Bad settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lookahed.W=3", "unknown setting lookahed.W=3: did you mean lookahead.W?"),
        ("W=3", "unknown setting W=3: did you mean lookahead.W?"),
        pytest.param(
            "max_tokens=3", "unknown setting max_tokens=3: did you mean max_new_tokens?", marks=pytest.mark.slow
        ),
        ("lokahead=7b", "unknown setting lokahead=7b: did you mean lookahead?"),
        ("xyzzy=3", "unknown setting xyzzy=3: see --help"),
        ("lookahead=9b", "lookahead=9b: must be one of 13b, 34b, 7b, auto, jacobi, none"),
        pytest.param(
            "launcher=slurm", "launcher=slurm: must be one of auto, local, ray, torchrun", marks=pytest.mark.slow
        ),
        ("model=hub", "model.path: is empty; must be a directory or a hub id"),
        ("+gpus=2", "+gpus=2: settings are written KEY=VALUE, without + or ~"),
        ("gpus", "gpus: settings are written KEY=VALUE, without + or ~"),
        ("lookahead.W=-1", "lookahead.W=-1: must be an integer >= 0"),
        ("lookahead.N=2.5", "lookahead.N=2.5: must be an integer >= 2"),
        ("lookahead.W=1,2", "lookahead.W=1,2: must be an integer >= 0"),
        pytest.param("gpus=0", "gpus=0: must be an integer >= 1", marks=pytest.mark.slow),
        pytest.param("gpus=two", "gpus=two: must be an integer >= 1", marks=pytest.mark.slow),
        ("eos=maybe", "eos=maybe: must be true or false"),
        ("launcher.timeout=soon", "launcher.timeout=soon: must be a number of seconds > 0 and <= 1000000"),
        ("prompt=", "prompt: is empty; it must have at least one character"),
    ],
)
def test_bad_settings_are_refused(refusal, override, message):
    assert refusal("prompt=x", override) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus_per_replica": "0"}, "gpus_per_replica=0: must be auto, fastest or an integer >= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be an integer >= 1"),
        ({"device": "tpu"}, "device=tpu: must be one of auto, cpu, cuda"),
        ({"dtype": "int4"}, "dtype=int4: must be one of auto, float32, bfloat16, float16"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(prompt="x", **settings)
    assert str(caught.value) == message


def test_settings_are_accepted_after_options(capsys):
    main(["prompt=x", "--cfg", "gpus=2"])
    assert "\ngpus: 2\n" in capsys.readouterr().out


def test_last_value_of_a_repeated_key_is_used_and_named(refusal):
    assert refusal("prompt=x", "gpus=2", "gpus=x") == "gpus=x: must be an integer >= 1"


def test_unreadable_value_is_named(refusal):
    assert refusal("prompt=x", "gpus=[").startswith("gpus=[: cannot be read")


def test_path_that_may_not_be_read_is_named(refusal, monkeypatch):
    def fails(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "/secret/conf")

    monkeypatch.setattr(cli, "load_config", fails)
    assert refusal("prompt=x") == "/secret/conf: Permission denied"


def test_missing_prompt_is_refused(refusal):
    assert refusal() == "prompt and prompts: give one of them (neither given)"
