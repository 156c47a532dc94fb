"""Tests that docs/settings.md matches the settings classes and conf/."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import write_settings_doc

        yield write_settings_doc
    sys.modules.pop("write_settings_doc")


@dataclass
class Base:
    """A settings class."""

    steps: int | None = None
    """Steps | to take,
    two lines."""
    names: list[str] | None = None


@dataclass
class Derived(Base):
    """A settings class with a base."""

    flag: bool = False
    """Whether to."""
    names: list[str] | None = None
    """Of the derived class."""


def test_settings_page_is_up_to_date(script):
    assert script.PATH.read_text() == script.document(), "run scripts/write_settings_doc.py"


def test_every_setting_of_every_command_has_a_row(script):
    from lp_runtime.config.overrides import help_keys

    text = script.document()
    for schema in script.COMMANDS.values():
        keys = [line.strip() for line in help_keys(schema).partition("keys:\n")[2].splitlines()]
        assert keys and [key for key in keys if f"| `{key}` |" not in text] == []


def test_table_has_types_defaults_and_inherited_docs(script):
    lines = script.table(Derived, ["steps", "flag", "names"], "group.")
    assert lines[2:] == [
        r"| `group.steps` | int | `null` | Steps \| to take, two lines. |",
        "| `group.flag` | bool | `false` | Whether to. |",
        "| `group.names` | list[str] | `null` | Of the derived class. |",
    ]


def test_field_without_a_docstring_is_refused(script):
    with pytest.raises(ValueError, match="Base.names: has no string under it"):
        script.table(Base, ["names"])
