"""The index of a corpus: its files, when it is rebuilt, what is refused; equal on all replicas."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from support.ranks import run_ranks

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.errors import ConfigError
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.replica.corpus_store import CorpusStore, KnownCorpus, open_corpus

VOCABULARY = 300


@pytest.fixture
def folder(tmp_path):
    """Two texts, a binary file, a hidden one and a link."""
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "a.py").write_text("abc")
    (folder / "below" / "b.py").write_text("de")
    (folder / "image").write_bytes(b"\x89\0\xff")
    (folder / "latin").write_bytes("é".encode("latin-1"))
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "link").symlink_to("a.py")
    return folder


def encode(seen: list[str], text: str) -> list[int]:
    seen.append(text)
    return list(text.encode())


def texts_of(paths, cache, key: str = "bytes") -> tuple[list[str], list[str]]:
    """Return (texts of the opened corpus, texts that were tokenized for it)."""
    seen: list[str] = []
    index = CorpusStore(
        str(paths), None if cache is None else str(cache), partial(encode, seen), key, VOCABULARY
    ).open()
    texts = bytes(token if token >= 0 else ord("|") for token in index.tokens.tolist()).decode().split("|")[:-1]
    assert sorted(index.places.tolist()) == list(range(len(index.tokens)))
    return [text for text in texts if text], seen


def test_unchanged_files_are_not_tokenized_again(folder, tmp_path):
    cache = tmp_path / "cache"
    assert texts_of(folder, cache) == (["abc", "de"], ["abc", "de"])
    assert texts_of(folder, cache) == (["abc", "de"], [])
    (folder / "a.py").write_text("abcd")
    (folder / "c.py").write_text("fg")
    assert texts_of(folder, cache) == (["abcd", "fg", "de"], ["abcd", "fg"])
    (folder / "below" / "b.py").unlink()
    assert texts_of(folder, cache) == (["abcd", "fg"], [])
    assert texts_of(folder, cache, "another tokenizer")[1] == ["abcd", "fg"]
    assert texts_of(folder, None) == (["abcd", "fg"], ["abcd", "fg"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-3],
        lambda data: data[:-8] + b"12345678",
        lambda data: b"{}\n",
        lambda data: b'{"num_tokens": Infinity}\n',
        lambda data: b"[" * 100_000 + b"\n",
    ],
)
def test_damaged_index_is_rebuilt(folder, tmp_path, damage, caplog):
    cache = tmp_path / "cache"
    texts_of(folder, cache)
    (file,) = (file for file in cache.iterdir() if file.suffix != ".lock")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert texts_of(folder, cache) == (["abc", "de"], ["abc", "de"])
    assert file.read_bytes() == whole and "is damaged and will be made again" in caplog.text


def test_index_of_a_folder_that_cannot_be_written_is_read(folder, tmp_path, monkeypatch, caplog):
    cache = tmp_path / "cache"
    texts_of(folder, cache)

    def refuses(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lp_runtime.replica.corpus_store.locked", refuses)
    assert texts_of(folder, cache) == (["abc", "de"], []) and not caplog.messages
    (folder / "a.py").write_text("abcd")
    assert texts_of(folder, cache) == (["abcd", "de"], ["abcd"])
    (warning,) = caplog.messages
    assert warning.endswith("cannot be written: Permission denied; each process makes its own index")


def test_bad_corpus_paths_are_refused_in_one_line(folder, tmp_path, monkeypatch):
    def refused(paths: object) -> str:
        with pytest.raises(ConfigError) as caught:
            texts_of(paths, tmp_path / "cache")
        return str(caught.value).removeprefix(f"lookahead.corpus={paths}: ")

    assert refused("/no/where") == "/no/where: no such file or folder"
    assert refused(folder / "image") == f"{folder / 'image'} is not a text in UTF-8"
    assert refused(folder / "latin") == f"{folder / 'latin'} is not a text in UTF-8"
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty") == "holds no text in UTF-8"
    with pytest.raises(ConfigError, match="lookahead.corpus=~no-user/x: ~no-user is no home folder here"):
        texts_of("~no-user/x", tmp_path / "cache")
    assert refused("/" + "x" * 5000).endswith(": File name too long")
    monkeypatch.setattr("lp_runtime.replica.corpus_store.MIN_TOKEN_BYTES", 1e-12)
    assert "give fewer files" in refused(folder) and "\n" not in refused(folder)


def test_files_that_vanish_are_left_out(folder, monkeypatch):
    def read(path: Path) -> bytes:
        if path.name == "a.py":
            raise FileNotFoundError(2, "No such file or directory")
        return path.open("rb").read()

    monkeypatch.setattr(Path, "read_bytes", read)
    assert texts_of(folder, None) == (["de"], ["de"])


def test_tokens_that_the_model_lacks_are_left_out(folder, tmp_path):
    for cache in (None, str(tmp_path / "cache")):
        store = CorpusStore(str(folder / "a.py"), cache, lambda text: [1, VOCABULARY, 2], "padded", VOCABULARY)
        assert store.open().tokens.tolist() == [1, 2, -1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_error_names_unreadable_file(folder):
    (folder / "a.py").chmod(0)
    with pytest.raises(ConfigError, match=r"a\.py cannot be read \(Permission denied\)"):
        texts_of(folder, None)


def opened(group, path: str, known: KnownCorpus, cache: str | None = None, is_start: bool = True) -> str | list[int]:
    """Return what a rank gets: the tokens or the error."""
    config = RuntimeConfig(lookahead=LookaheadConfig(corpus=path), cache_dir=cache)
    try:
        index = open_corpus(config, lambda: load_tokenizer(ModelConfig()), 1 << 20, group, known, is_start)
        return index.tokens.tolist()
    except ConfigError as error:
        return str(error)


def opened_by_rank(group, paths_of_ranks: list[list[str]]) -> list[str | list[int]]:
    return [opened(group, paths[group.rank], KnownCorpus()) for paths in paths_of_ranks]


def opened_after_restart(group, folder: str, cache: str) -> list[str | list[int]]:
    """Return what a rank gets at the start, after the last rank was restarted, and once the index is gone, too."""
    known = KnownCorpus()
    results = [opened(group, folder, known, cache)]
    for damages in (False, True):
        if group.rank == group.size - 1:
            shutil.rmtree(folder, ignore_errors=True)
            if damages:
                shutil.rmtree(cache)
            known = KnownCorpus()
        results.append(opened(group, folder, known, cache, is_start=False))
    return results


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_restarted_replica_takes_the_corpus_of_the_start(folder, tmp_path, num_replicas):
    for first, same, none in run_ranks(opened_after_restart, num_replicas, str(folder), str(tmp_path / "cache")):
        assert first == same and first.count(-1) == 4 and none == []


def test_replicas_open_same_corpus_or_none(folder):
    both = str(folder)
    one, two = run_ranks(opened_by_rank, 2, [[both, both], [both, str(folder / "a.py")], [both, "/no"]])
    assert one[0] == two[0] and one[0].count(-1) == 4
    differ = "lookahead.corpus: its files differ between replicas, or change while they are read; all need the same"
    assert (one[1], two[1]) == (differ, differ)
    assert one[2] == "lookahead.corpus: cannot be opened by rank 1"
    assert two[2] == "lookahead.corpus=/no: /no: no such file or folder"


def test_text_in_corpus_takes_fewer_steps(one_layer_demo_dir, tmp_path):
    """The corpus is the answer of an earlier run, sampled so that it repeats nothing; the output is equal."""
    settings = {"tokens": 16, "draft_tables": "request"}

    def answer(corpus: str | None):
        with LookaheadRuntime(
            str(one_layer_demo_dir), device="cpu", dtype="float32", lookahead=LookaheadConfig(corpus=corpus, **settings)
        ) as runtime:
            if corpus:
                with pytest.raises(ConfigError, match="of a request it must be the runtime's own"):
                    runtime.generate("def f(", 8, lookahead=LookaheadConfig(corpus="/etc"))
            return runtime.generate(
                "def train(", 40, eos=False, lookahead=LookaheadConfig(**settings), sampling=SamplingConfig(1.0, seed=7)
            )

    plain = answer(None)
    (tmp_path / "text.py").write_text("def train(" + plain.text)
    known = answer(str(tmp_path))
    assert known.token_ids == plain.token_ids and known.steps < 0.6 * plain.steps
