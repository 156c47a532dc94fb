"""Settings classes: their defaults, their ranges, and the errors for values out of range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lp_runtime.config.commands import BenchConfig, ChatConfig, GenerateConfig
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig, paper_depth
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import DEMO_MODEL, FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.errors import ConfigError, ConstraintError
from lp_runtime.lookahead.drafters.paper.drafter import PaperDrafter

PROMPT = {"prompt": "x"}
FILE = {"prompts": "in.jsonl", "output": "out.jsonl"}


def refusal(schema, **values) -> str:
    with pytest.raises(ConfigError) as caught:
        schema(**values)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_generate_config_has_the_expected_defaults():
    config = GenerateConfig(**PROMPT)
    assert config.lookahead == LookaheadConfig() and config.lookahead.is_auto
    assert (config.lookahead.drafter, config.lookahead.draft_tables) == ("full", "auto")
    assert config.model.location == str(DEMO_MODEL)
    assert (config.gpus, config.device, config.dtype, config.launcher.name) == (None, "auto", "auto", "auto")
    assert (config.max_new_tokens, config.eos, config.ids, config.limit) == (None, True, False, None)
    assert (config.exactness, config.strict_tokens, config.num_samples) == ("fast", 128, 1)


@pytest.mark.parametrize("values", [{"W": 0}, {"N": 2}, {"G": 0}, {"W": 1}, {"W": 0, "N": 2, "G": 0}, {"W": 100}])
def test_boundary_lookahead_settings_are_accepted(values):
    config = LookaheadConfig(**values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"W": -1}, "lookahead.W=-1: must be an integer >= 0"),
        ({"N": 1}, "lookahead.N=1: must be an integer >= 2"),
        (
            {"W": 10**9, "N": 5},
            "lookahead.W=1000000000 N=5 G=None budget=None: (W + G) (N - 1), and budget, must be at most 16384",
        ),
        (
            {"budget": 10**6},
            "lookahead.W=None N=None G=None budget=1000000: (W + G) (N - 1), and budget, must be at most 16384",
        ),
        ({"N": 0}, "lookahead.N=0: must be an integer >= 2"),
        ({"G": -3}, "lookahead.G=-3: must be an integer >= 0"),
        ({"W": 1.5}, "lookahead.W=1.5: must be an integer >= 0"),
        ({"W": "a"}, "lookahead.W=a: must be an integer >= 0"),
        ({"W": True}, "lookahead.W=True: must be an integer >= 0"),
        ({"budget": 0}, "lookahead.budget=0: must be an integer >= 1"),
        ({"tokens": 0}, "lookahead.tokens=0: must be an integer >= 1"),
        ({"tokens": 64, "W": 5}, "lookahead.tokens=64: not with lookahead.W=5"),
        ({"tokens": 64, "budget": 16}, "lookahead.tokens=64: not with lookahead.budget=16"),
        ({"tokens": 64, "drafter": "paper"}, "lookahead.tokens=64: only with lookahead.drafter=full"),
        ({"tokens": 20_000}, "lookahead.tokens=20000: must be at most 16384"),
        ({"drafter": "best"}, "lookahead.drafter=best: must be one of full, paper, prompt_lookup, recycling"),
        ({"acceptance": "all"}, "lookahead.acceptance=all: must be one of tree, guesses"),
        ({"acceptance": "guesses"}, "lookahead.acceptance=guesses: only with lookahead.drafter=paper"),
        ({"prior": "all"}, "lookahead.prior=all: must be one of vocabulary, none"),
        ({"draft_tables": ""}, "lookahead.draft_tables='': must be auto, request, runtime or the path of a file"),
        ({"draft_tables_bytes": 1000}, "lookahead.draft_tables_bytes=1000: must be an integer >= 65536"),
        ({"window_seed": -1}, "lookahead.window_seed=-1: must be an integer >= 0"),
    ],
)
def test_invalid_lookahead_settings_are_refused(values, message):
    assert refusal(LookaheadConfig, **values) == message


@pytest.mark.parametrize("window", [(15, 5, 15), (1, 2, 0), (0, 4, 2), (3, 2, 0), (0, 2, 0)])
def test_paper_depth_is_that_of_the_drafter(window):
    assert PaperDrafter(window).max_committed == paper_depth(*window) + 1


def test_setting_one_of_w_n_g_turns_off_auto():
    assert LookaheadConfig().window == (15, 5, 15)
    assert not LookaheadConfig(W=7).is_auto and LookaheadConfig(W=7).window == (7, 5, 15)
    assert not LookaheadConfig(drafter="paper").is_auto


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": ""}, "model.path: is empty; must be a directory or a hub id"),
        ({"attn_implementation": "flash"}, "model.attn_implementation=flash: must be one of auto, sdpa, eager"),
        ({"prefill_chunk": 0}, "model.prefill_chunk=0: must be an integer >= 1"),
    ],
)
def test_invalid_model_settings_are_refused(values, message):
    assert refusal(ModelConfig, **values) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "slurm"}, "launcher=slurm: must be one of auto, local, torchrun, ray"),
        ({"port": -1}, "launcher.port=-1: must be an integer >= 0"),
        ({"interface": ""}, "launcher.interface: is empty; must be the name of a network interface"),
        ({"port": 65536}, "launcher.port=65536: must be 0 to 65535"),
        ({"timeout": 0.0}, "launcher.timeout=0.0: must be a number of seconds > 0 and <= 1000000"),
        ({"timeout": float("inf")}, "launcher.timeout=inf: must be a number of seconds > 0 and <= 1000000"),
        ({"start_timeout": float("nan")}, "launcher.start_timeout=nan: must be a number of seconds > 0 and <= 1000000"),
        ({"start_timeout": "x"}, "launcher.start_timeout=x: must be a number of seconds > 0 and <= 1000000"),
    ],
)
def test_invalid_launcher_settings_are_refused(values, message):
    assert refusal(LauncherConfig, **values) == message


def test_paths_may_be_path_objects(tmp_path):
    text = str(tmp_path)
    assert ModelConfig(path=tmp_path) == ModelConfig(path=text) and ModelConfig(path=tmp_path).location == text
    assert ModelConfig(path=Path("~/models")).location == str(Path.home() / "models")
    lookahead = LookaheadConfig(draft_tables=tmp_path, corpus=tmp_path)
    assert lookahead == LookaheadConfig(draft_tables=text, corpus=text)
    assert RuntimeConfig(cache_dir=tmp_path, profile_dir=tmp_path) == RuntimeConfig(cache_dir=text, profile_dir=text)


def test_files_of_commands_may_lie_below_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/where")
    files = {"prompts": "~/in", "output": Path("~/out")}
    assert vars(GenerateConfig(**files)).items() >= {"prompts": "/where/in", "output": "/where/out"}.items()
    assert BenchConfig(prompts="~/in:text", output="~/out").output == "/where/out"
    assert ChatConfig(url="http://host:1", api_key_file="~/key").api_key_file == "/where/key"
    config = ServeConfig(api_keys="~/keys", ssl_certfile="~/cert", ssl_keyfile="~/pem")
    assert (config.api_keys, config.ssl_certfile, config.ssl_keyfile) == ("/where/keys", "/where/cert", "/where/pem")


def test_a_home_folder_of_no_user_is_refused():
    for make in (
        lambda path: GenerateConfig(prompt="x", output=path),
        lambda path: ChatConfig(url="http://host:1", api_key_file=path),
        lambda path: ServeConfig(api_keys=path),
        lambda path: RuntimeConfig(cache_dir=path),
        lambda path: ModelConfig(path=path).location,
    ):
        with pytest.raises(ConfigError, match="=~no-user/x: ~no-user is no home folder here; a relative path is"):
            make("~no-user/x")


def test_valid_sampling_settings_are_accepted():
    for values in (
        {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1, "seed": 5},
        {"temperature": 2, "top_k": 5, "top_p": 0.1, "min_p": 1, "typical_p": 0.5, "repetition_penalty": 0.5},
        {"no_repeat_ngram_size": 0, "min_new_tokens": 3, "bad_words_ids": [[1], [2, 3]], "logit_bias": {4: -1}},
        {"seed": 2**64 - 1},
    ):
        SamplingConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "sampling.temperature=-0.1: must be 0 (greedy) or a number >= 0.0001"),
        ({"temperature": 1e-9}, "sampling.temperature=1e-09: must be 0 (greedy) or a number >= 0.0001"),
        ({"temperature": float("inf")}, "sampling.temperature=inf: must be 0 (greedy) or a number >= 0.0001"),
        ({"temperature": 10**400}, f"sampling.temperature={10**400}: must be 0 (greedy) or a number >= 0.0001"),
        ({"temperature": True}, "sampling.temperature=True: must be 0 (greedy) or a number >= 0.0001"),
        ({"top_p": 0}, "sampling.top_p=0: must be in (0, 1]"),
        ({"top_p": 1.1}, "sampling.top_p=1.1: must be in (0, 1]"),
        ({"typical_p": "x"}, "sampling.typical_p=x: must be in (0, 1]"),
        ({"min_p": -0.1}, "sampling.min_p=-0.1: must be in [0, 1]"),
        ({"top_k": -1}, "sampling.top_k=-1: must be an integer >= 0"),
        ({"repetition_penalty": -1}, "sampling.repetition_penalty=-1: must be a number > 0"),
        ({"no_repeat_ngram_size": -1}, "sampling.no_repeat_ngram_size=-1: must be an integer >= 0"),
        ({"min_new_tokens": 1.5}, "sampling.min_new_tokens=1.5: must be an integer >= 0"),
        ({"seed": -1}, "sampling.seed=-1: must be an integer >= 0"),
        ({"seed": 2**64}, f"sampling.seed={2**64}: must be 0 to 2**64 - 1"),
        ({"bad_words_ids": [[]]}, "sampling.bad_words_ids=[[]]: must be lists of token ids, not empty"),
        ({"bad_words_ids": 5}, "sampling.bad_words_ids=5: must be lists of token ids"),
        ({"logit_bias": [1]}, "sampling.logit_bias=[1]: must be {TOKEN_ID: BIAS, ...}"),
        ({"bad_words_ids": [[-2]]}, "sampling.bad_words_ids=-2: must be an integer >= 0"),
        ({"logit_bias": {-1: 2.0}}, "sampling.logit_bias=-1: must be an integer >= 0"),
        ({"logit_bias": {3: float("nan")}}, "sampling.logit_bias of token 3=nan: must be a number"),
        ({"temperature": 0, "top_p": 0.9}, "sampling.top_p=0.9: has no effect with sampling.temperature=0"),
    ],
)
def test_invalid_sampling_settings_are_refused(values, message):
    assert refusal(SamplingConfig, **values) == message


def test_sampling_settings_are_checked_against_model_defaults():
    assert not SamplingConfig().samples({})
    assert SamplingConfig(temperature=0.5).samples({})
    assert SamplingConfig().samples({"do_sample": True})
    assert not SamplingConfig(temperature=0).samples({"do_sample": True})
    SamplingConfig(top_k=3).check({"do_sample": True})
    SamplingConfig(temperature=0, seed=3).check({})
    for values in ({"top_k": 3}, {"seed": 3}):
        with pytest.raises(
            ConfigError, match=r"sampling.\w+=3: has no effect with the model's default, greedy decoding"
        ):
            SamplingConfig(**values).check({})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": [""]}, "stop='': must be strings of at least one character"),
        ({"stop": 5}, "stop=5: must be a list of strings"),
        ({"compare": True, "max_time": 2}, "compare=true: not with max_time, which ends the two at different lengths"),
        (
            {"exactness": "strict", "lookahead": LookaheadConfig(W=30, N=5, drafter="paper")},
            "lookahead.W=30 lookahead.N=5: a step may commit 33 tokens; with exactness=strict it must be at most 32"
            " (W + N - 2, or N without a window)",
        ),
        ({"exactness": "exact"}, "exactness=exact: must be one of fast, strict"),
        (
            {"model": ModelConfig(device_map="auto"), "gpus": 2},
            "model.device_map=auto: only with gpus=1",
        ),
        ({"stop": [3]}, "stop=3: must be strings of at least one character"),
        ({"max_time": 0}, "max_time=0: must be a number of seconds > 0 and <= 1000000"),
        ({"max_time": 10**400}, f"max_time={10**400}: must be a number of seconds > 0 and <= 1000000"),
        ({"num_samples": 0}, "num_samples=0: must be an integer >= 1"),
        ({"logprobs": True}, "logprobs=true: only with prompts"),
        ({"compare": True, "num_samples": 2}, "compare=true: only with a single prompt and sample"),
    ],
)
def test_invalid_limits_and_samples_are_refused(values, message):
    assert refusal(GenerateConfig, prompt="x", **values) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus": 0}, "gpus=0: must be an integer >= 1"),
        ({"gpus": -2}, "gpus=-2: must be an integer >= 1"),
        ({"gpus": 1.0}, "gpus=1.0: must be an integer >= 1"),
        ({"gpus_per_replica": 2, "gpus": 3}, "gpus=3: must be a multiple of gpus_per_replica=2"),
        ({"gpus_per_replica": 0}, "gpus_per_replica=0: must be auto, fastest or an integer >= 1"),
        ({"device": "tpu"}, "device=tpu: must be one of auto, cpu, cuda"),
        ({"dtype": "int8"}, "dtype=int8: must be one of auto, float32, bfloat16, float16"),
    ],
)
def test_invalid_runtime_settings_are_refused(values, message):
    assert refusal(RuntimeConfig, **values) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "prompt and prompts: give one of them (neither given)"),
        (PROMPT | FILE, "prompt and prompts: give one of them (both given)"),
        ({"prompt": ""}, "prompt: is empty; it must have at least one character"),
        ({"prompts": "in.jsonl"}, "output: must be given with prompts"),
        (PROMPT | {"output": "out.jsonl"}, "output=out.jsonl: only with prompts"),
        (PROMPT | {"limit": 3}, "limit=3: only with prompts"),
        (FILE | {"limit": 0}, "limit=0: must be an integer >= 1"),
        (FILE | {"compare": True}, "compare=true: only with a single prompt and sample"),
        (PROMPT | {"max_new_tokens": 0}, "max_new_tokens=0: must be an integer >= 1"),
        (PROMPT | {"gpus": 0}, "gpus=0: must be an integer >= 1"),
    ],
)
def test_invalid_generate_settings_are_refused(values, message):
    assert refusal(GenerateConfig, **values) == message


def test_nccl_is_refused_on_cpus():
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(device="cpu", launcher=LauncherConfig(backend="nccl"))
    assert str(caught.value) == "launcher.backend=nccl: not with device=cpu"


def test_numbers_of_numpy_become_plain_ones():
    given = {"temperature": np.float32(0.5), "top_k": np.int64(5), "bad_words_ids": [np.array([3])]}
    config = SamplingConfig(**given, logit_bias={np.int64(5): np.float32(1)})
    assert config == SamplingConfig(temperature=0.5, top_k=5, bad_words_ids=[[3]], logit_bias={5: 1.0})
    numbers = [config.temperature, config.top_k, config.bad_words_ids[0][0], *config.logit_bias.items()]
    assert [*map(type, numbers[:3])] + [*map(type, numbers[3])] == [float, int, int, int, float]
    assert SamplingConfig(bad_words_ids=[[np.int32(3)], [torch.tensor(4)]]).bad_words_ids == [[3], [4]]
    assert type(LookaheadConfig(W=np.int64(5)).W) is int
    assert type(ModelConfig(prefill_chunk=torch.tensor(64)).prefill_chunk) is int
    assert type(LauncherConfig(timeout=np.float32(64)).timeout) is float
    assert type(FailureConfig(restarts=np.int64(1)).restarts) is int
    assert refusal(SamplingConfig, logit_bias={"5": 1.0}) == "sampling.logit_bias='5': must be an integer >= 0"
    assert refusal(SamplingConfig, temperature="0.5").startswith("sampling.temperature='0.5': must be")
    assert refusal(SamplingConfig, top_k=np.True_).startswith("sampling.top_k=True: ")


def test_constraints_are_unicode_texts():
    assert ConstraintConfig(grammar='\ufeffroot ::= "a"') == ConstraintConfig(grammar='root ::= "a"')
    assert ConstraintConfig(json_schema="\ufeff{}").source == "{}"
    for values in ({"choice": ["a", "\ud83d"]}, {"regex": "\ud83d"}, {"json_schema": {"const": ["\ud83d"]}}):
        with pytest.raises(ConstraintError, match=f"^constraint.{next(iter(values))}.*Unicode"):
            _ = ConstraintConfig(**values).source
