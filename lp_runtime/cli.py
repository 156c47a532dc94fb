"""lp-generate: Hydra overrides in, text or a file of results out. Hydra and OmegaConf go no further than this file."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lp_runtime.api import LookaheadRuntime
from lp_runtime.batch import check_output, generate_file, read_prompts
from lp_runtime.config import GenerateConfig
from lp_runtime.errors import ConfigError, LaunchError, LookaheadError, ModelError, RequestError, first_line
from lp_runtime.model.loading import check_location
from lp_runtime.parallel.group import ReplicaContext, started_by_torchrun
from lp_runtime.single import generate_one, parse_ids

# Free text and paths: taken to the letter, where Hydra's grammar would want most of Python quoted.
LITERAL_KEYS = ("prompt", "prompts", "output", "prompt_field", "model.path")
BAD_INPUT = (ConfigError, RequestError, ModelError, LaunchError)
EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130

USAGE = """\
lp-generate prompt="def fib(n):" [gpus=2] [lookahead.W=15 lookahead.N=5 lookahead.G=15] [KEY=VALUE ...]
       lp-generate prompts=FILE.jsonl output=OUT.jsonl [prompt_field=prompt] [KEY=VALUE ...]"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits the process with 0, 2 (bad input), 1 (failed while working) or 130 (Ctrl-C)."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    rank = 0
    try:
        if started_by_torchrun():
            rank = ReplicaContext.from_torchrun().rank
        options = _parser().parse_args(arguments)
        try:
            config = load_config(options.overrides, options.config_dir)
            if not options.cfg:
                check_location(config.model)
        except LookaheadError:
            if rank:  # rank 0 meets the same error; torchrun would end it before it can say so if this rank failed too
                return
            raise
        if options.cfg:
            print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
        else:
            run(config, is_leader=rank == 0)
    except LookaheadError as error:
        print(f"error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILED)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain once more at exit
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def run(config: GenerateConfig, is_leader: bool = True) -> None:
    """Do what a checked configuration says. Under torchrun, ranks that do not lead serve rank 0's requests."""
    # What can be refused without a model is refused before replicas start; by rank 0, whose end ends the others.
    work = _prepare(config) if is_leader else None
    with LookaheadRuntime.from_config(config) as runtime:
        if work is not None:
            work(runtime)  # the other ranks serve as they leave the block


def _prepare(config: GenerateConfig) -> Callable[[LookaheadRuntime], None]:
    if config.prompts is not None:
        check_output(Path(config.output))
        return partial(generate_file, config=config, prompts=read_prompts(config))
    prompt = parse_ids(config.prompt, "prompt") if config.ids else config.prompt
    return partial(generate_one, config=config, prompt=prompt)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lp-generate",
        usage=USAGE,
        description="Generate text with lookahead parallelism. Settings are Hydra overrides.",
        epilog=_help_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="see below; groups are chosen by name")
    parser.add_argument("--cfg", action="store_true", help="print the resulting settings and exit")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with further configuration groups")
    return parser


def _help_keys() -> str:
    groups = [f"  {group}={'|'.join(names)}" for group, names in _groups().items()]
    return "\n".join(["groups:", *groups, "", "keys:", *(f"  {key}" for key in _keys(GenerateConfig))])


def _conf_dir() -> Path:
    """The folder conf/: inside the installed package lp_runtime.conf, or beside lp_runtime in a bare checkout."""
    spec = importlib.util.find_spec("lp_runtime.conf")
    if spec is not None and spec.submodule_search_locations:
        return Path(list(spec.submodule_search_locations)[0])
    return Path(__file__).resolve().parent.parent / "conf"


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


def load_config(overrides: list[str], config_dir: str | None = None) -> GenerateConfig:
    """Compose conf/ and the overrides into a checked GenerateConfig.

    Args:
        overrides: KEY=VALUE in Hydra's grammar; values of LITERAL_KEYS are taken to the letter.
        config_dir: a folder with further groups.

    Raises:
        ConfigError: if a key is unknown or a value is not allowed.
    """
    literal: dict[str, str] = {}
    rest = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not re.match(r"[\w.]+$", key):
            raise ConfigError(f"{override}: settings are written KEY=VALUE, all keys are there (no + or ~)")
        if key in LITERAL_KEYS:
            literal[key] = value
        else:
            rest.append(override)
    ConfigStore.instance().store(name="schema", node=GenerateConfig)
    search = [f"hydra.searchpath=[{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        with initialize_config_dir(str(_conf_dir()), version_base="1.3"):
            composed = compose("config", overrides=[*search, *rest])
        values = OmegaConf.to_container(composed, resolve=True)
    except MissingConfigException as error:
        options = ", ".join(error.options or []) or "none"
        raise ConfigError(f"{_culprit(str(error.missing_cfg_file), rest)}: must be one of {options}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, rest)) from error
    return _build(GenerateConfig, values, literal)


def _build(schema: type, values: dict, literal: dict[str, str], prefix: str = ""):
    """A settings class from a nested dict; `literal` has values by whole key, which OmegaConf would interpret."""
    hints = get_type_hints(schema)
    arguments = {}
    for name, value in values.items():
        key = prefix + name
        if is_dataclass(hints[name]):
            value = _build(hints[name], value, literal, f"{key}.")
        arguments[name] = literal.get(key, value)
    return schema(**arguments)


def _culprit(missing: str, overrides: list[str]) -> str:
    group, _, name = missing.partition("/")
    wanted = f"{group}={name}"
    return next((override for override in overrides if override == wanted), wanted)


def _explain(error: Exception, overrides: list[str]) -> str:
    """Hydra's several lines in one: which override, and what is allowed."""
    text = f"{error}\n{error.__cause__ or ''}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read ({first_line(error).rstrip('.')}); values are in Hydra's grammar"
    match = re.search(r"(?:Could not [^']*|Key |argument |override )'?([\w.]+)", text)
    key = match.group(1) if match else None
    override = next((o for o in reversed(overrides) if key and o.partition("=")[0] == key), None)
    if key and key not in _keys(GenerateConfig):
        known = [*_keys(GenerateConfig), *_groups()]
        close = [name for name in known if name.endswith(f".{key}")]
        close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "see lp-generate --help"
        return f"unknown setting {override or key}: {hint}"
    if override:
        return _refusal(key, override.partition("=")[2]) or f"{override}: {first_line(error.__cause__ or error)}"
    return f"settings: {first_line(error.__cause__ or error)}"


def _refusal(key: str, value: str) -> str | None:
    """What the settings class itself says of a value that could not even be converted to the key's type."""
    schema, (*groups, name) = GenerateConfig, key.split(".")
    for group in groups:
        schema = get_type_hints(schema)[group]
    if get_type_hints(schema)[name] is bool:
        return f"{key}={value}: must be true or false"
    try:
        schema(**{name: value})
    except ConfigError as error:
        return str(error)
    return None
