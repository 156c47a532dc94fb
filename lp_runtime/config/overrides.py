"""Conversion of Hydra overrides to a checked settings class. Only this file uses Hydra and OmegaConf."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lp_runtime.config.checks import home_path
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import ConfigError, first_line

# Free text and paths are read literally: Hydra's grammar would need quotes around most Python code.
LITERAL_KEYS = (
    "prompt",
    "prompts",
    "output",
    "prompt_field",
    "model.path",
    "system",
    "constraint.regex",
    "constraint.reasoning_end",
    "constraint.reasoning_begin",
)
STRING_KEYS = ("stop", "constraint.choice")  # one string, or a JSON list of strings
FILE_KEYS = ("constraint.json_schema", "constraint.grammar", "constraint.structural_tag")  # names of files to read
# Current names of settings by their former names, for the "did you mean" message.
RENAMED = {
    "lookahead.policy": "lookahead.drafter",
    "lookahead.memory": "lookahead.draft_tables",
    "lookahead.memory_bytes": "lookahead.draft_tables_bytes",
    "launcher.apart": "launcher.own_process",
}
ITEMS = {str: "texts", int: "integers", float: "numbers"}  # names of a list's items
MAX_SHOWN = 200  # characters of a value that a message quotes, so that it stays readable in a terminal
MIN_SIMILARITY = 0.6  # difflib's similarity of a suggested key to the unknown one; its default

Config = TypeVar("Config", bound=RuntimeConfig)
T = TypeVar("T")


def as_yaml(config: RuntimeConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def help_keys(schema: type[RuntimeConfig]) -> str:
    """Return the groups and keys that can be overridden, one per line, for --help."""
    groups = [f"  {group}={'|'.join(names)}" for group, names in _groups().items()]
    return "\n".join(["groups:", *groups, "", "keys:", *(f"  {key}" for key in _keys(schema))])


def _conf_dir() -> Path:
    """Return the folder conf/: the installed package lp_runtime.conf, or next to lp_runtime in a checkout."""
    spec = importlib.util.find_spec("lp_runtime.conf")
    if spec is not None and spec.submodule_search_locations:
        return Path(list(spec.submodule_search_locations)[0])
    return Path(__file__).resolve().parent.parent.parent / "conf"


def _groups() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for file in sorted(_conf_dir().glob("*/*.yaml")):
        groups.setdefault(file.parent.name, []).append(file.stem)
    return groups


def _keys(schema: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    keys = []
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            keys += _keys(hints[item.name], f"{prefix}{item.name}.")
        else:
            keys.append(prefix + item.name)
    return keys


def load_config(schema: type[Config], overrides: list[str], config_dir: str | None = None) -> Config:
    """Build checked settings from the files of conf/, of `config_dir` (further groups), and the overrides.

    Overrides are KEY=VALUE in Hydra's grammar, with exceptions. Values of LITERAL_KEYS are literal text, as are those
    of other text settings that Hydra would not read as text. Values of STRING_KEYS are one literal string or a JSON
    list of strings. Values of FILE_KEYS are file names. `sampling.logit_bias` is {TOKEN_ID: BIAS, ...}, and
    `chat_template_kwargs` {NAME: VALUE, ...}.
    """
    config_dir = home_path("--config-dir", config_dir)
    literal, composed = _split(schema, overrides, config_dir)
    values = _compose(schema, composed, config_dir)
    try:
        return _build(schema, values, literal)
    except ConfigError as error:
        raise ConfigError(_as_written(str(error), composed, values)) from error


def _as_written(message: str, overrides: list[str], values: Mapping[str, Any]) -> str:
    """Return a message about a setting with the text of its override in place of Python's: null, not None."""
    for override in reversed(overrides):
        key, _, text = override.partition("=")
        value: Any = values
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        for shown in (str(value), repr(value)):
            if message.startswith(f"{key}={shown}:"):
                return f"{key}={_cut(text)}{message.removeprefix(f'{key}={shown}')}"
    return message


def _split(schema: type, overrides: list[str], config_dir: str | None) -> tuple[dict[str, Any], list[str]]:
    """Parse the overrides that are not left to Hydra; return (values by key, overrides for Hydra)."""
    literal: dict[str, Any] = {}
    composed = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not re.match(r"[\w.]+$", key):
            raise ConfigError(f"{_cut(override)}: settings are written KEY=VALUE, without + or ~")
        if key.partition(".")[0] == "hydra":
            raise ConfigError(f"unknown setting {_cut(override)}: see --help")
        if key in _keys(schema) and (read := _reader_of(schema, key, override)) is not None:
            literal[key] = read(value)
        else:
            _check_group(key, value, config_dir)
            composed.append(override)
            literal.pop(key, None)  # the last override of a key wins
    return literal, composed


def _reader_of(schema: type, key: str, override: str) -> Callable[[str], Any] | None:
    """Return the function that parses a setting's value here; None if Hydra parses it."""
    if key in STRING_KEYS:
        return partial(_strings, key)
    if key in FILE_KEYS:
        return partial(_text_of, key)
    if key == "sampling.logit_bias":
        return partial(_biases, key)
    if key == "chat_template_kwargs":  # Hydra would refuse keys that the default does not have
        return partial(_mapping, key)
    is_literal = key in LITERAL_KEYS or (_type_of(schema, key) is str and _is_odd_text(override))
    return str if is_literal else None


def _type_of(schema: type, key: str) -> object:
    """Return the type of a setting, str for an optional str; None for an unknown key."""
    hint: Any = schema
    for name in key.split("."):
        hint = get_type_hints(hint).get(name) if is_dataclass(hint) else None
    return str if hint == (str | None) else hint


def _is_odd_text(override: str) -> bool:
    """Whether Hydra would read an override's value as neither text nor null; 12e4567 as infinity."""
    try:
        value = OverridesParser.create().parse_override(override).value()
    except (HydraException, ValueError, RecursionError):
        return True
    return value is not None and not isinstance(value, str)


def _compose(schema: type, overrides: list[str], config_dir: str | None) -> dict[str, Any]:
    """Compose settings with Hydra, to a nested dict; convert Hydra's errors to ConfigError."""
    ConfigStore.instance().store(name="schema", node=schema)
    search = []
    if config_dir:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such folder")
        quoted = re.sub(r"(\\*)'", r"\1\1\\'", str(folder))
        search.append(f"hydra.searchpath=['{quoted}']")
    try:
        with initialize_config_dir(str(_conf_dir()), version_base="1.3"):
            composed = compose("config", overrides=[*search, *overrides])
        # The cast is safe: the keys of a structured config are its fields' names.
        return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file).partition("/")
        options = ", ".join(error.options or []) or "none"
        raise ConfigError(f"{group}={name}: must be one of {options}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(schema, error, overrides)) from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, deeply nested brackets
        raise ConfigError(f"{_unreadable(overrides)}: cannot be read ({first_line(error)})") from error


def _check_group(key: str, value: str, config_dir: str | None) -> None:
    """Check that a group's value is the name of a preset; Hydra would also accept lists and paths."""
    names = _groups().get(key)
    if names is None:
        return
    further = [file.stem for file in Path(config_dir).glob(f"{key}/*.yaml")] if config_dir else []
    if value not in (*names, *further):
        raise ConfigError(f"{key}={_cut(value)}: must be one of {', '.join(sorted({*names, *further}))}")


def _unreadable(overrides: list[str]) -> str:
    """Return the first override that Hydra's parser cannot read."""
    parser = OverridesParser.create()
    for override in overrides:
        try:
            parser.parse_override(override)
        except (ValueError, RecursionError):
            return _cut(override)
    return "settings"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _build(schema: type[T], values: dict[str, Any], literal: dict[str, Any], prefix: str = "") -> T:
    """Build a settings class from nested values by field; `literal`, by full dotted key, overrides them."""
    hints = get_type_hints(schema)
    arguments = {}
    for name, value in values.items():
        key = prefix + name
        if is_dataclass(hints[name]):
            value = _build(hints[name], value, literal, f"{key}.")
        arguments[name] = literal.get(key, value)
    return schema(**arguments)


def _strings(key: str, value: str) -> list[str]:
    if not value.startswith("["):
        return [value]
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={_cut(value)}: must be a string or a JSON list of strings ({error})") from error


def _text_of(key: str, path: str) -> str:
    """Read the file that a setting names; raise ConfigError if it is not readable UTF-8."""
    try:
        return Path(home_path(key, path)).read_text(encoding="utf-8-sig")  # Windows editors write a byte-order mark
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={_cut(path)}: cannot be read: {first_line(error)}") from error


def _mapping(key: str, value: str) -> dict[str, Any]:
    try:
        read = OverridesParser.create().parse_override(f"{key}={value}").value()
        if not isinstance(read, dict):
            raise ValueError("no braces")
    except (HydraException, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={_cut(value)}: must be {{NAME: VALUE, ...}}") from error
    return read


def _biases(key: str, value: str) -> dict[int, float]:
    """Parse {TOKEN_ID: BIAS, ...}; ids may be quoted, as in JSON."""
    biases = {}
    try:
        if not (value.startswith("{") and value.endswith("}")):
            raise ValueError("no braces")
        for pair in filter(None, value[1:-1].split(",")):
            token, bias = pair.split(":")
            biases[int(token.strip(" \"'"))] = float(bias)
    except ValueError as error:
        raise ConfigError(f"{key}={value}: must be {{TOKEN_ID: BIAS, ...}}") from error
    return biases


def _explain(schema: type, error: Exception, overrides: list[str]) -> str:
    """Convert Hydra's multi-line message to one line: the override, and what is allowed."""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read ({first_line(error).rstrip('.')}); values must be in Hydra's grammar"
    key = _key_in(f"{error}\n{error.__cause__ or ''}")
    override = next((o for o in reversed(overrides) if key and o.partition("=")[0] == key), None)
    if key and key not in _keys(schema):
        return f"unknown setting {override or key}: {_suggestion(schema, key)}"
    reason = first_line(error.__cause__ or error)
    if override:
        return _refusal(schema, key, override.partition("=")[2]) or f"{override}: {reason}"
    return f"settings: {reason}"


def _key_in(message: str) -> str:
    """Return the key that a message of Hydra or OmegaConf names; empty if none."""
    match = re.search(r"(?:Could not [^']*|Key |argument |override )'?([\w.]+)", message)
    return match.group(1) if match else ""


def _suggestion(schema: type, key: str) -> str:
    """Suggest a remedy for an unknown key: its new name, the closest known key, or --help."""
    known = [*_keys(schema), *_groups()]
    close = [RENAMED[key]] if key in RENAMED else [name for name in known if name.endswith(f".{key}")]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=MIN_SIMILARITY)
    return f"did you mean {close[0]}?" if close else "see --help"


def _refusal(schema: type, key: str, value: str) -> str | None:
    """Return the settings class's own message about a value of the wrong type; None if there is none."""
    *groups, name = key.split(".")
    for group in groups:
        schema = get_type_hints(schema)[group]
    kind = get_type_hints(schema)[name]
    if kind is bool:
        return f"{key}={value}: must be true or false"
    listed = next((each for each in (kind, *get_args(kind)) if get_origin(each) is list), None)
    if listed is not None:
        return f"{key}={value}: must be a list of {ITEMS.get(get_args(listed)[0], 'lists')}"
    try:
        schema(**{name: value})
    except ConfigError as error:
        return str(error)
    return None
