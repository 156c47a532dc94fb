"""Command-line overrides: what an unknown key suggests. More of them are in tests/entrypoints/test_cli.py."""

from __future__ import annotations

import pytest

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("lookahead.policy=paper", "lookahead.drafter"),
        ("lookahead.memory=request", "lookahead.draft_tables"),
        ("lookahead.memory_bytes=65536", "lookahead.draft_tables_bytes"),
        ("launcher.apart=true", "launcher.own_process"),
        ("lookahead.W_=3", "lookahead.W"),
    ],
)
def test_renamed_settings_are_suggested(override, name):
    with pytest.raises(ConfigError) as caught:
        load_config(GenerateConfig, ["prompt=x", override])
    assert str(caught.value) == f"unknown setting {override}: did you mean {name}?"
