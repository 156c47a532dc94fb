"""The output file of lp-generate: one result a line, next to a file of the settings that produced them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ConfigError, LookaheadError
from lp_runtime.utils.json_line import to_json

GROUPS = {"loading": ModelConfig, "lookahead": LookaheadConfig, "sampling": SamplingConfig}  # in a file of settings

Key = tuple[int, int, int]  # identifies a result: index of the prompt, sample, turn


def check_output(path: Path) -> None:
    """Raise ConfigError, before replicas start, if an output is not writable or not lp-generate's own."""
    try:
        if path.is_dir():
            raise ConfigError(f"output={path}: cannot be written: is a directory")
        if not path.parent.is_dir():
            raise ConfigError(f"output={path}: cannot be written: there is no directory {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"output={path}: cannot be written: no permission")
        if _is_kept(path) and path.exists() and path.stat().st_size and not _settings_path(path).exists():
            raise ConfigError(f"output={path}: exists and was not written by lp-generate; choose another output")
    except OSError as error:  # for example a name that is too long, or a folder without permission
        raise ConfigError(f"output={path}: cannot be written: {error.strerror}") from error


def _is_kept(path: Path) -> bool:
    """Whether an output is a regular file, which is resumed and gets a file of settings: no pipe or standard output."""
    is_stream = str(path) in ("/dev/stdout", "/dev/stderr") or str(path.parent) in ("/dev/fd", "/proc/self/fd")
    return not is_stream and (path.is_file() or not path.exists())


def _settings_path(output: Path) -> Path:
    return output.with_name(output.name + ".settings")


def _setting_of(settings: Mapping[str, Any], key: str) -> object:
    """Return a setting of a file; a setting that the file's version did not have yet has its default."""
    value = settings.get(key, getattr(GenerateConfig, key, None))
    if key in GROUPS and isinstance(value, dict):
        value = json.loads(json.dumps(asdict(GROUPS[key]()) | value, default=str))
    return without_tables(value) if key == "lookahead" and isinstance(value, dict) else value


def without_tables(lookahead: dict[str, Any]) -> dict[str, Any]:
    """Return drafting settings without draft tables and corpus, whose content another run may not have."""
    return {name: value for name, value in lookahead.items() if not name.startswith(("draft_tables", "corpus"))}


def answer_of(result: Mapping[str, Any]) -> str:
    """Return a result's answer as the next turn of its conversation shows it: of a chat without its reasoning."""
    return (result.get("message") or {"content": str(result["text"])})["content"] or ""


class OutputFile:
    """A file of results, with the settings that produced them in PATH.settings."""

    def __init__(self, path: Path, settings: Mapping[str, object], seed: int | None, free: tuple[str, ...] = ()):
        self._path = path
        self._free = free  # names of settings that may differ from the run that began the file
        self._settings_path = _settings_path(path)
        self._settings = json.loads(json.dumps(settings, default=str))  # normalized to compare with those of a file
        # Of the first prompt, None if decoding is greedy; after `resume`, of the run that began the file.
        self.seed = seed
        self._is_kept = _is_kept(path)
        self._file: TextIO | None = None

    def resume(self) -> dict[Key, str]:
        """Open the file for appending, for this run alone; return the answers of the results that it already has."""
        path = self._path
        done: dict[Key, str] = {}
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(open(path, "a", encoding="utf-8"))
                if self._is_kept:
                    self._lock(self._file)
                if self._is_kept and path.stat().st_size:
                    self._check_settings()
                    done = self._read_done()
                elif self._is_kept:
                    self._settings_path.write_text(json.dumps(self._settings | {"seed": self.seed}, indent=1) + "\n")
            except OSError as error:
                raise ConfigError(f"output={path}: cannot be written: {error.strerror or error}") from error
            stack.pop_all()  # __exit__ closes the file
        return done

    def _lock(self, file: TextIO) -> None:
        """Lock the file until it is closed, so that no other run writes the same results."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"output={self._path}: another lp-generate is writing it") from error
        except OSError:  # a file system without locks
            pass

    def _check_settings(self) -> None:
        try:
            before = dict(json.loads(self._settings_path.read_text()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"output={self._path}: {self._settings_path.name} is not readable") from error
        for key in [*self._settings, *before]:  # some settings are left out where they are not used
            was, value = _setting_of(before, key), self._settings.get(key)
            if was != value and key not in self._free and key != "seed":
                raise ConfigError(
                    f"output={self._path}: holds results of other settings"
                    f" ({key} was {json.dumps(was)}, is {json.dumps(value)}); choose another output"
                )
        self.seed = before.get("seed")

    def _read_done(self) -> dict[Key, str]:
        """Return the answers of the file's results; remove an incomplete last line from the file."""
        done: dict[Key, str] = {}
        num_bytes = 0  # of complete lines
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    result = json.loads(line)
                    done[int(result["index"]), int(result["sample"]), int(result.get("turn", 0))] = answer_of(result)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ConfigError(f"output={self._path} line {number}: is not a result of lp-generate") from error
                num_bytes += len(line)
        os.truncate(self._path, num_bytes)
        return done

    def write(self, result: Mapping[str, object]) -> None:
        assert self._file is not None  # opened by `resume`
        try:
            self._file.write(to_json(result) + "\n")
            self._file.flush()
            if self._is_kept:
                os.fsync(self._file.fileno())
        except BrokenPipeError:  # its reader has gone: the command ends silently, as if stdout had lost its reader
            raise
        except OSError as error:
            raise self._write_failure(error) from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """Close the file; fail if buffered text cannot be written, unless another error has ended the block."""
        assert self._file is not None  # opened by `resume`
        try:
            self._file.close()
        except OSError as error:  # close() retries text that `write` failed to write; its error was reported then
            if kind is None:
                raise self._write_failure(error) from error

    def _write_failure(self, error: OSError) -> LookaheadError:
        return LookaheadError(f"output={self._path}: writing failed: {error.strerror or error}")
