"""Hydra overrides in, a checked settings class out. Hydra and OmegaConf go no further than this file."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import ConfigError, first_line

# Free text and paths: taken to the letter, where Hydra's grammar would want most of Python quoted.
LITERAL_KEYS = ("prompt", "prompts", "output", "prompt_field", "model.path", "system")
MAX_SHOWN = 200  # characters of an override that cannot be read

Config = TypeVar("Config", bound=RuntimeConfig)


def as_yaml(config: RuntimeConfig) -> str:
    """The settings as a YAML document."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def help_keys(schema: type[RuntimeConfig]) -> str:
    """The groups and keys that can be overridden, for --help."""
    groups = [f"  {group}={'|'.join(names)}" for group, names in _groups().items()]
    return "\n".join(["groups:", *groups, "", "keys:", *(f"  {key}" for key in _keys(schema))])


def _conf_dir() -> Path:
    """The folder conf/: inside the installed package lp_runtime.conf, or beside lp_runtime in a bare checkout."""
    spec = importlib.util.find_spec("lp_runtime.conf")
    if spec is not None and spec.submodule_search_locations:
        return Path(list(spec.submodule_search_locations)[0])
    return Path(__file__).resolve().parent.parent.parent / "conf"


def _groups() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted(_conf_dir().glob("*/*.yaml")):
        found.setdefault(file.parent.name, []).append(file.stem)
    return found


def _keys(schema: type, prefix: str = "") -> list[str]:
    """Every key of a settings class, nested ones with dots."""
    hints = get_type_hints(schema)
    keys = []
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            keys += _keys(hints[item.name], f"{prefix}{item.name}.")
        else:
            keys.append(prefix + item.name)
    return keys


def load_config(schema: type[Config], overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose conf/ and the overrides into a checked settings class.

    Args:
        schema: the class.
        overrides: KEY=VALUE in Hydra's grammar; values of LITERAL_KEYS are taken to the letter, and `stop` is one
            string to the letter or a JSON list of strings.
        config_dir: a folder with further groups.

    Raises:
        ConfigError: if a key is unknown or a value is not allowed.
    """
    literal: dict[str, Any] = {}
    rest = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not re.match(r"[\w.]+$", key):
            raise ConfigError(f"{_cut(override)}: settings are written KEY=VALUE, all keys are there (no + or ~)")
        if key in LITERAL_KEYS and key in _keys(schema):
            literal[key] = value
        elif key == "stop":
            literal[key] = _strings(key, value)
        elif key == "sampling.logit_bias":
            literal[key] = _biases(key, value)
        elif key.partition(".")[0] == "hydra":
            raise ConfigError(f"unknown setting {_cut(override)}: see --help")
        else:
            _check_group(key, value, config_dir)
            rest.append(override)
    ConfigStore.instance().store(name="schema", node=schema)
    search = [f"hydra.searchpath=[{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        with initialize_config_dir(str(_conf_dir()), version_base="1.3"):
            composed = compose("config", overrides=[*search, *rest])
        values = OmegaConf.to_container(composed, resolve=True)
    except MissingConfigException as error:
        options = ", ".join(error.options or []) or "none"
        raise ConfigError(f"{_culprit(str(error.missing_cfg_file), rest)}: must be one of {options}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(schema, error, rest)) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets in brackets
        raise ConfigError(f"{_unreadable(rest)}: cannot be read ({first_line(error)})") from error
    return _build(schema, values, literal)


def _check_group(key: str, value: str, config_dir: str | None) -> None:
    """Refuse what is no name of a group's; Hydra takes lists, too, and looks for files of any name.

    Raises:
        ConfigError: names those that are there.
    """
    names = _groups().get(key)
    if names is None:
        return
    further = [file.stem for file in Path(config_dir).glob(f"{key}/*.yaml")] if config_dir else []
    if value not in (*names, *further):
        raise ConfigError(f"{key}={_cut(value)}: must be one of {', '.join(sorted({*names, *further}))}")


def _unreadable(overrides: list[str]) -> str:
    """The first override that Hydra's parser breaks at."""
    parser = OverridesParser.create()
    for override in overrides:
        try:
            parser.parse_override(override)
        except (ValueError, RecursionError):
            return _cut(override)
    return "settings"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _build(schema: type, values: dict, literal: dict[str, Any], prefix: str = ""):
    """A settings class from a nested dict; `literal` has values by whole key, which OmegaConf would interpret."""
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


def _biases(key: str, value: str) -> dict[int, float]:
    """{TOKEN_ID: BIAS, ...}; quotes around the ids, as JSON has them, may be there."""
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


def _culprit(missing: str, overrides: list[str]) -> str:
    group, _, name = missing.partition("/")
    wanted = f"{group}={name}"
    return next((override for override in overrides if override == wanted), wanted)


def _explain(schema: type, error: Exception, overrides: list[str]) -> str:
    """Hydra's several lines in one: which override, and what is allowed."""
    text = f"{error}\n{error.__cause__ or ''}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read ({first_line(error).rstrip('.')}); values are in Hydra's grammar"
    match = re.search(r"(?:Could not [^']*|Key |argument |override )'?([\w.]+)", text)
    key = match.group(1) if match else None
    override = next((o for o in reversed(overrides) if key and o.partition("=")[0] == key), None)
    if key and key not in _keys(schema):
        known = [*_keys(schema), *_groups()]
        close = [name for name in known if name.endswith(f".{key}")]
        close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else "see --help"
        return f"unknown setting {override or key}: {hint}"
    if override:
        return (
            _refusal(schema, key, override.partition("=")[2]) or f"{override}: {first_line(error.__cause__ or error)}"
        )
    return f"settings: {first_line(error.__cause__ or error)}"


def _refusal(schema: type, key: str, value: str) -> str | None:
    """What the settings class itself says of a value that could not even be converted to the key's type."""
    *groups, name = key.split(".")
    for group in groups:
        schema = get_type_hints(schema)[group]
    if get_type_hints(schema)[name] is bool:
        return f"{key}={value}: must be true or false"
    try:
        schema(**{name: value})
    except ConfigError as error:
        return str(error)
    return None
