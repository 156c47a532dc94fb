"""Command-line overrides: suggestions for unknown keys, and values of text settings.

More overrides are tested in tests/entrypoints/test_cli.py.
"""

from __future__ import annotations

import pytest
from support.thinned import thinned

from lp_runtime.config.commands import BenchConfig, GenerateConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("lookahead.policy=paper", "lookahead.drafter"),
        pytest.param("lookahead.memory=request", "lookahead.draft_tables", marks=pytest.mark.slow),
        pytest.param("lookahead.memory_bytes=65536", "lookahead.draft_tables_bytes", marks=pytest.mark.slow),
        ("launcher.apart=true", "launcher.own_process"),
        ("lookahead.W_=3", "lookahead.W"),
    ],
)
def test_renamed_settings_are_suggested(override, name):
    with pytest.raises(ConfigError) as caught:
        load_config(GenerateConfig, ["prompt=x", override])
    assert str(caught.value) == f"unknown setting {override}: did you mean {name}?"


TEXTS = ["12e4567", "1_000", "007", "true", "Zm9vYmFy==", "[a", "inf", "abc"]


@pytest.mark.parametrize("first", thinned(3, range(len(TEXTS))))
def test_text_values_are_not_parsed(first):
    """Hydra would read some texts as numbers and lose digits; an API key may look like a number.

    Each case gives three settings, which take 0.15 s to compose, three consecutive texts.
    """
    texts = (TEXTS * 2)[first : first + 3]
    keys = ["api_key", "model.revision", "launcher.interface"]
    config = load_config(ServeConfig, [f"{key}={text}" for key, text in zip(keys, texts, strict=True)])
    assert [config.api_key, config.model.revision, config.launcher.interface] == texts


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("prefix_cache_bytes=null", "must be 0, because prompts are decoded several times"),
        ("rate=-1e0", "must be a number > 0"),
        ("exchange_us=[null]", "must be a list of numbers"),
        ("methods=null", "must be a list of texts"),
        ("sampling.bad_words_ids=[[x]]", "must be a list of lists"),
    ],
)
def test_refusal_quotes_the_override_as_it_was_written(override, reason):
    with pytest.raises(ConfigError) as caught:
        load_config(BenchConfig, [override])
    assert str(caught.value) == f"{override}: {reason}"


def test_list_of_texts_is_parsed_as_a_list():
    assert load_config(BenchConfig, ["methods=[hf,plain]"]).methods == ["hf", "plain"]


def test_text_values_support_interpolation_null_and_quotes(monkeypatch):
    monkeypatch.setenv("LP_TEST", "a key")
    assert load_config(ServeConfig, ["api_key=12", "api_key=${oc.env:LP_TEST}"]).api_key == "a key"
    assert load_config(ServeConfig, ["api_key=12", "api_key=null"]).api_key is None
    assert load_config(ServeConfig, ["api_key='12'"]).api_key == "12"


def test_home_directory_is_expanded_in_model_path(monkeypatch):
    monkeypatch.setenv("HOME", "/where")
    assert load_config(ServeConfig, ["model.path=~/model"]).model.location == "/where/model"


def test_presets_in_a_folder_below_the_home_directory_can_be_chosen(tmp_path, monkeypatch):
    (tmp_path / "mine" / "lookahead").mkdir(parents=True)
    (tmp_path / "mine" / "lookahead" / "small.yaml").write_text("W: 3\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(GenerateConfig, ["prompt=x", "lookahead=small"], "~/mine").lookahead.W == 3


def test_template_variables_are_read_as_a_mapping():
    given = "{enable_thinking: false, more: {a: [1, null]}}"
    variables = load_config(ServeConfig, [f"chat_template_kwargs={given}"]).chat_template_kwargs
    assert variables == {"enable_thinking": False, "more": {"a": [1, None]}}
    for value in ("5", "{a", "[1]"):
        with pytest.raises(ConfigError, match="chat_template_kwargs=.*: must be {NAME: VALUE, ...}"):
            load_config(ServeConfig, [f"chat_template_kwargs={value}"])
