#!/usr/bin/env python3
"""Write docs/settings.md: every setting of our commands, from the settings classes.

    python scripts/write_settings_doc.py            write the file
    python scripts/write_settings_doc.py --check    write nothing; exit with 1 if the file is out of date

A setting's meaning is the string under its field in lp_runtime/config/; a preset's is the comment at the top of its
file in conf/. tests/docs/test_settings_doc.py checks that the file is up to date.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from lp_runtime.config.commands import BenchConfig, ChatConfig, GenerateConfig
from lp_runtime.config.overrides import FILE_KEYS, LITERAL_KEYS
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import RuntimeConfig

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "settings.md"

COMMANDS = {"lp-generate": GenerateConfig, "lp-chat": ChatConfig, "lp-serve": ServeConfig, "lp-bench": BenchConfig}
GROUP_ORDER = ("model", "lookahead", "sampling", "launcher")

HEAD = """\
# Settings

<!-- Written by scripts/write_settings_doc.py from lp_runtime/config/ and conf/. Do not edit; run the script. -->

```console
$ lp-generate prompt="def fib(n):" lookahead=7b gpus=2 sampling.temperature=0.7 --cfg | grep -E "W:|gpus:|temperature:"
  W: 15
  temperature: 0.7
gpus: 2
```

- `KEY=VALUE` sets one setting. `GROUP=NAME` takes a [preset](#presets); settings given with it override it.
- `--help` lists the keys without their meanings.
- `--config-dir DIR` adds a folder of presets: `DIR/lookahead/mine.yaml` for `lookahead=mine`.
- `--cfg` prints every setting with its value and stops.
- Values are in [Hydra](https://hydra.cc)'s grammar: `null`, `true`, `[1,2]`, `{{a: 1}}`.
- Text needs none of Hydra's quoting in {literal}.
- `stop` and `constraint.choice` are one string, or a JSON list of strings.
- {files} are names of files, which are read.
- A path may begin with `~`, the home folder on the machine that reads or writes the file. A relative path whose name
  begins with `~` is written `./~name`.
- An unknown key is refused with the closest known one. A value out of range is refused with the allowed range.
- In Python the groups are dataclasses: `LookaheadConfig(W=15)`, `SamplingConfig(...)`, `LauncherConfig(...)`.

Settings of [every command](#settings-of-every-command), and of [lp-generate](#lp-generate), [lp-chat](#lp-chat),
[lp-serve](#lp-serve) and [lp-bench](#lp-bench) alone. lp-doctor has those of every command.
"""


def field_docs(schema: type) -> dict[str, str]:
    """Return the string under each field of a settings class and its bases, as one line each."""
    docs: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not is_dataclass(base):
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for item, below in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[item.target.id] = " ".join(str(below.value.value).split())
    return docs


def type_name(hint: Any) -> str:
    """Return a field's type as a user writes it: `int`, `list[str]`; without None for an optional field."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    (kind,) = kinds
    if kind is Any:
        return "any"
    return str(kind).replace("typing.", "") if get_origin(kind) else kind.__name__


def yaml_of(value: Any) -> str:
    """Return a value as it is typed on the command line and printed by `--cfg`."""
    return json.dumps(value) if value in (None, "") or isinstance(value, bool | list) else str(value)


def default_of(item: Field) -> str:
    """Return a field's default as it is typed on the command line."""
    if item.default is not MISSING:
        return yaml_of(item.default)
    assert item.default_factory is not MISSING  # every setting has a default
    return yaml_of(item.default_factory())


def table(schema: type, names: list[str], prefix: str = "") -> list[str]:
    """Return the lines of a table of a class's fields.

    Raises:
        ValueError: if a field has no string under it.
    """
    docs, hints, by_name = field_docs(schema), get_type_hints(schema), {item.name: item for item in fields(schema)}
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name in names:
        if name not in docs:
            raise ValueError(f"{schema.__name__}.{name}: has no string under it")
        cells = f"`{prefix}{name}`", type_name(hints[name]), f"`{default_of(by_name[name])}`", docs[name]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return lines


def group_table(schema: type, group: str) -> list[str]:
    """Return a group's description and the lines of its table."""
    docstring = " ".join((inspect.getdoc(schema) or "").split())
    return [docstring, "", *table(schema, [item.name for item in fields(schema)], f"{group}.")]


def presets() -> list[str]:
    """Return the lines of one table for each group of conf/."""
    lines = []
    for group in GROUP_ORDER:
        lines += [f"### `{group}=`", "", "| preset | sets | meaning |", "| --- | --- | --- |"]
        for file in sorted((ROOT / "conf" / group).glob("*.yaml")):
            text = file.read_text()
            comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
            values = yaml.safe_load(text) or {}
            sets = ", ".join(f"`{group}.{key}={yaml_of(value)}`" for key, value in values.items())
            lines.append(f"| `{file.stem}` | {sets} | {' '.join(comments)} |")
        lines.append("")
    return lines


def document() -> str:
    """Return the text of docs/settings.md."""
    literal = ", ".join(f"`{key}`" for key in sorted(LITERAL_KEYS))
    files = ", ".join(f"`{key}`" for key in sorted(FILE_KEYS))
    lines = [HEAD.format(literal=literal, files=files), "## Presets", ""]
    lines += ["The default presets are `model=demo`, `lookahead=auto`, `sampling=model` and `launcher=auto`.", ""]
    lines += [*presets(), "## Settings of every command", ""]
    hints = get_type_hints(RuntimeConfig)
    groups = [item.name for item in fields(RuntimeConfig) if is_dataclass(hints[item.name])]
    common = [item.name for item in fields(RuntimeConfig) if item.name not in groups]
    lines += ["### The runtime", "", *table(RuntimeConfig, common), ""]
    for group in groups:
        lines += [f"### `{group}.`", "", *group_table(hints[group], group), ""]
    for command, schema in COMMANDS.items():
        own = [item.name for item in fields(schema) if item.name not in {*groups, *common}]
        hints = get_type_hints(schema)
        own_groups = [name for name in own if is_dataclass(hints[name])]
        lines += [f"## {command}", "", *table(schema, [name for name in own if name not in own_groups]), ""]
        for group in own_groups:
            lines += [f"### `{group}.`", "", *group_table(hints[group], group), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the file, or compare it with the generated text."""
    text = document()
    if sys.argv[1:] == ["--check"]:
        if not PATH.exists() or PATH.read_text() != text:
            sys.exit("docs/settings.md is not what lp_runtime/config/ says: run scripts/write_settings_doc.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        PATH.write_text(text)


if __name__ == "__main__":
    main()
