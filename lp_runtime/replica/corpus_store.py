"""A corpus on disk: files of text, tokenized and indexed once, mapped by all processes of a machine.

The index of some paths is one file of `cache_dir`: a line of JSON, padded, then the arrays of a CorpusIndex. When files
change, those alone are tokenized again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from lp_runtime.config.checks import home_path
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.lookahead.drafters.best_first.corpus import NO_CORPUS, CorpusIndex, index_tokens
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.model.tokenizer import encode, tokenizer_key
from lp_runtime.utils.files import locked, write_whole

log = logging.getLogger(__name__)

VERSION = 1
ALIGNMENT = 64  # bytes of the line before the arrays are a multiple of this
INDEX_BYTES = 64  # of memory for each token while places are sorted
MIN_TOKEN_BYTES = 2  # of text for each token, roughly and at least
DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # raised by `_mapped` for a damaged file
Encode = Callable[[str], list[int]]
Signatures = dict[str, list[int]]  # size and time of the last change by path: whether a file has changed


class CorpusStore:
    """The corpus of some paths, for one tokenizer.

    Args:
        paths: files and folders, separated by ":". Of folders, hidden files and what is not text is left out.
        folder: of the index; None to keep it in memory.
        tokenizer_key: names the tokenizer.
    """

    def __init__(self, paths: str, folder: str | None, encode: Encode, tokenizer_key: str, vocabulary_size: int):
        self._given = f"lookahead.corpus={paths}"
        given = [home_path("lookahead.corpus", path) for path in paths.split(os.pathsep) if path]
        self._paths = [Path(path).absolute() for path in given]
        self._encode, self._vocabulary_size = encode, vocabulary_size
        self._file: Path | None = None
        if folder is not None:
            with contextlib.suppress(RuntimeError):  # "~" cannot be expanded: no home folder
                key = repr((VERSION, [str(path) for path in self._paths], tokenizer_key, vocabulary_size))
                name = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
                self._file = Path(folder).expanduser() / f"corpus-{name}"

    def open(self) -> CorpusIndex:
        """Return the index, made or brought up to date if necessary; ConfigError if the paths do not allow it."""
        if self._file is None:
            return self._make(self._signatures(), {}, None)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._file.with_suffix(".lock")):  # one process of the machine makes it, the others wait
                return self._open(self._file)
        except OSError as error:
            known, index = self._saved(self._file)
            signatures = self._signatures()
            if index is not None and known == signatures:
                return index
            log.warning("%s cannot be written: %s; each process makes its own index", self._file, error.strerror)
            return self._make(signatures, known, index)

    def reopen(self) -> CorpusIndex | None:
        """Return the index that was made last, without a look at the files; None if there is none on disk."""
        try:
            return None if self._file is None else _mapped(self._file, self._vocabulary_size)[1]
        except (OSError, *DAMAGED):
            return None

    def _saved(self, file: Path) -> tuple[Signatures, CorpusIndex | None]:
        """Return the files and the index that a file holds; nothing if it is missing, damaged or another user's."""
        try:
            return _mapped(file, self._vocabulary_size)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass
        except (OSError, *DAMAGED):
            log.warning("%s is damaged and will be made again", file)
        return {}, None

    def _open(self, file: Path) -> CorpusIndex:
        known, index = self._saved(file)
        signatures = self._signatures()
        if index is None or known != signatures:
            write_whole(file, _packed(signatures, self._make(signatures, known, index)), is_private=True)
            _, index = _mapped(file, self._vocabulary_size)
        return index

    def _make(self, signatures: Signatures, known: Signatures, index: CorpusIndex | None) -> CorpusIndex:
        """Return the index of files; the tokens of those that are the same in `known` are taken from `index`."""
        texts = _by_signature(known, index)
        num_bytes, free = sum(size for size, _ in signatures.values()), psutil.virtual_memory().available
        if num_bytes // MIN_TOKEN_BYTES * INDEX_BYTES > free:
            needed = num_bytes // MIN_TOKEN_BYTES * INDEX_BYTES
            raise ConfigError(
                f"{self._given}: {num_bytes / 1e6:.0f} MB of text take {needed / 1e9:.1f} GB of memory to index, and"
                f" {free / 1e9:.1f} GB are free; give fewer files"
            )
        parts = [
            texts[key] if (key := (path, *signature)) in texts else self._tokens_of(Path(path))
            for path, signature in signatures.items()
        ]
        num_tokens = sum(len(part) - 1 for part in parts)
        if num_tokens <= 0:
            raise ConfigError(f"{self._given}: holds no text in UTF-8")
        log.info("%s: %d tokens in %d files", self._given, num_tokens, len(signatures))
        return index_tokens(np.concatenate(parts))

    def _tokens_of(self, file: Path) -> np.ndarray:
        """Return a file's token ids and -1, [n + 1] int32; -1 alone for a file in a folder that is no text.

        Tokens that a tokenizer has and the model has not are left out.
        """
        ids: list[int] = []
        try:
            data = file.read_bytes()
            if b"\0" in data:
                raise ValueError("it is binary")
            ids = [token for token in self._encode(data.decode()) if token < self._vocabulary_size]
        except OSError as error:
            if not self._has_vanished(file, error):
                raise self._unreadable(file, error) from error
        except (ValueError, RequestError) as error:
            if file in self._paths:
                raise ConfigError(f"{self._given}: {file} is not a text in UTF-8") from error
        return np.array([*ids, -1], np.int32)

    def _signatures(self) -> Signatures:
        """Return the signatures of the regular files of all paths, in order."""
        signatures = {}
        for path in self._paths:
            try:
                path.stat()
            except OSError as error:
                raise ConfigError(f"{self._given}: {path}: {_reason(error)}") from error
            if not path.is_file() and not path.is_dir():
                raise ConfigError(f"{self._given}: {path}: no such file or folder")
            for file in [path] if path.is_file() else _files_below(path):
                try:
                    status = file.lstat() if file != path else file.stat()
                except OSError as error:
                    if self._has_vanished(file, error):
                        continue
                    raise self._unreadable(file, error) from error
                if stat.S_ISREG(status.st_mode):
                    signatures[str(file)] = [status.st_size, status.st_mtime_ns]
        return signatures

    def _has_vanished(self, file: Path, error: OSError) -> bool:
        """Whether a file of a folder is gone that was there a moment ago, as editors' temporary files are."""
        return isinstance(error, FileNotFoundError) and file not in self._paths

    def _unreadable(self, file: Path, error: OSError) -> ConfigError:
        return ConfigError(f"{self._given}: {file} cannot be read ({error.strerror or error})")


@dataclass
class KnownCorpus:
    """The corpus of a replica's process, opened once, however often the replica joins a group."""

    index: CorpusIndex | None = None  # None before it is opened
    digest: int = -1  # of the tokens, 56 bits; -1 before it is opened

    def hold(self, index: CorpusIndex | None) -> None:
        if index is not None:
            self.index = index
            self.digest = int.from_bytes(hashlib.blake2b(index.tokens.tobytes(), digest_size=7).digest(), "big")


def open_corpus(
    config: RuntimeConfig,
    load: Callable[[], Tokenizer],
    vocabulary_size: int,
    group: Group,
    known: KnownCorpus,
    is_start: bool,
) -> CorpusIndex:
    """Return the corpus of the settings, equal on all replicas of a group; NO_CORPUS if they name none.

    Looks at the files at the start only. A replica that joins later, after a restart, takes the index that was made
    then; if it cannot, all replicas of the group go on without a corpus. `load` returns the tokenizer.

    Raises:
        ConfigError: at the start it cannot be opened on some replica, or differs between them; raised on all.
    """
    paths = config.lookahead.corpus
    if paths is None:
        return NO_CORPUS

    def make_store() -> CorpusStore:
        tokenizer = load()
        encode_text = partial(encode, tokenizer, add_special_tokens=False)
        return CorpusStore(paths, config.cache_dir, encode_text, tokenizer_key(tokenizer), vocabulary_size)

    if is_start:
        return _open_first(make_store, known, group)
    if known.index is None:
        with contextlib.suppress(ConfigError):
            known.hold(make_store().reopen())
    if len(set(_gathered_digests(known, group))) > 1 or known.index is None:
        log.warning("lookahead.corpus=%s: not used by this group: a restarted replica has none or another one", paths)
        return NO_CORPUS
    return known.index


def _open_first(make_store: Callable[[], CorpusStore], known: KnownCorpus, group: Group) -> CorpusIndex:
    """Open the corpus on all replicas; see `open_corpus`."""
    refused: ConfigError | None = None
    try:
        store = make_store()
        known.hold(store.open())
    except ConfigError as error:
        refused = error
    digests = _gathered_digests(known, group)
    if len(set(digests)) > 1 and -1 not in digests:  # files have changed meanwhile: take the index of the last process
        known.hold(store.reopen())
        digests = _gathered_digests(known, group)
    if refused is not None:
        raise refused
    if -1 in digests:
        raise ConfigError(f"lookahead.corpus: cannot be opened by rank {digests.index(-1)}")
    if len(set(digests)) > 1:
        raise ConfigError(
            "lookahead.corpus: its files differ between replicas, or change while they are read; all need the same"
        )
    assert known.index is not None
    return known.index


def _gathered_digests(known: KnownCorpus, group: Group) -> list[int]:
    digests: list[int] = gather_rows(np.array([known.digest]), group)[:, 0].tolist()
    return digests


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, in order, without hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(place, name)


def _reason(error: OSError) -> str:
    return "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _by_signature(known: Signatures, index: CorpusIndex | None) -> dict[tuple, np.ndarray]:
    """Return the tokens of each file of an index, -1 included, by path, size and time."""
    if index is None:
        return {}
    ends = np.flatnonzero(index.tokens < 0) + 1
    texts = np.split(index.tokens, ends[:-1])
    return {(path, *signature): text for (path, signature), text in zip(known.items(), texts, strict=True)}


def _packed(signatures: Signatures, index: CorpusIndex) -> bytes:
    arrays = index.tokens.tobytes() + index.places.tobytes()
    digest = hashlib.blake2b(arrays, digest_size=16).hexdigest()
    line = json.dumps({"files": signatures, "num_tokens": len(index.tokens), "digest": digest}).encode()
    return line.ljust(-(-(len(line) + 1) // ALIGNMENT) * ALIGNMENT - 1) + b"\n" + arrays


def _mapped(file: Path, vocabulary_size: int) -> tuple[Signatures, CorpusIndex]:
    """Map an index file; return its files and arrays. One of DAMAGED if it is damaged."""
    with open(file, "rb") as opened:
        head = json.loads(opened.readline())
        start, num_tokens = opened.tell(), int(head["num_tokens"])
    # Copy on write: shared by all processes, and of the same type as arrays in memory for compiled code.
    tokens, places = np.memmap(file, np.int32, "c", start, (2, num_tokens))
    if hashlib.blake2b(np.concatenate([tokens, places]).tobytes(), digest_size=16).hexdigest() != head["digest"]:
        raise ValueError("damaged")
    if not (tokens.max() < vocabulary_size and (tokens < 0).sum() == len(head["files"])):
        raise ValueError("damaged")
    return head["files"], CorpusIndex(tokens.view(np.ndarray), places.view(np.ndarray))
