"""The file that keeps draft tables after a runtime has ended."""

import threading
from pathlib import Path

import pytest
from support.processes import wait_until
from support.ranks import run_ranks

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import ConfigError
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables, stored_stamp
from lp_runtime.replica import draft_store
from lp_runtime.replica.draft_store import DraftStore
from lp_runtime.utils.files import is_locked

PROMPT = [17, 31, 8, 22, 36, 13]
NUM_NEW = 24
OPTIONS = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def model_dir(make_model_dir) -> str:
    """A random model whose texts repeat themselves, so that guesses are right."""
    return str(make_model_dir(seed=5, initializer_range=0.3))


def settings(draft_tables) -> LookaheadConfig:
    return LookaheadConfig(W=5, N=5, G=5, draft_tables=str(draft_tables), draft_tables_bytes=1 << 20, prior="none")


def steps(runtime: LookaheadRuntime, **options) -> int:
    return runtime.generate(PROMPT, NUM_NEW, eos=False, **options).steps


def test_next_runtime_loads_draft_tables_without_changing_output(model_dir, tmp_path):
    file = tmp_path / "draft_tables.npz"
    with LookaheadRuntime(model_dir, lookahead=settings(file), **OPTIONS) as runtime:
        plain = runtime.generate(PROMPT, NUM_NEW, eos=False, lookahead=PLAIN)
        first = runtime.generate(PROMPT, NUM_NEW, eos=False)
        second = runtime.generate(PROMPT, NUM_NEW, eos=False)
        assert second.steps < first.steps
        assert steps(runtime, lookahead=settings("request")) == first.steps
        with pytest.raises(ConfigError, match="lookahead.draft_tables=/elsewhere: of a request it must be"):
            steps(runtime, lookahead=settings("/elsewhere"))
    with LookaheadRuntime(model_dir, lookahead=settings(file), gpus=2, **OPTIONS) as runtime:
        third = runtime.generate(PROMPT, NUM_NEW, eos=False)
    assert third.steps <= second.steps
    assert plain.token_ids == first.token_ids == second.token_ids == third.token_ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft_tables.npz", "draft_tables.npz.lock"]


@pytest.mark.slow
def test_requests_with_same_salt_share_draft_tables(model_dir):
    with LookaheadRuntime(model_dir, lookahead=settings("auto"), **OPTIONS) as runtime:
        alone = steps(runtime, lookahead=settings("request"))
        assert steps(runtime, lookahead=settings("request")) == alone
        first, second = steps(runtime), steps(runtime)
        assert second < first == alone
        assert steps(runtime, cache_salt="another") == alone
        assert steps(runtime, lookahead=settings("runtime")) <= second


def test_server_shares_draft_tables_by_default_only_with_api_keys():
    def draft_tables(*settings: str) -> str:
        return load_config(ServeConfig, list(settings)).lookahead.draft_tables

    assert draft_tables() == "request"
    assert draft_tables("lookahead.draft_tables=runtime") == "runtime", "unless it is told to"
    assert draft_tables("api_key=secret") == draft_tables("api_keys=FILE") == "auto"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("junk.npz", b"junk", "it is not saved draft tables; give another path, or delete it"),
        ("none/where.npz", None, "cannot be read or written (File exists)"),
    ],
)
def test_unusable_draft_tables_file_is_refused_at_start(model_dir, tmp_path, name, content, message):
    (tmp_path / "none").write_text("a file, not a folder")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        LookaheadRuntime(model_dir, lookahead=settings(tmp_path / name), **OPTIONS)
    assert str(caught.value) == f"lookahead.draft_tables={tmp_path / name}: {message}"


def test_draft_tables_in_a_device_are_refused(model_dir):
    """Reading it would not end."""
    with pytest.raises(ConfigError, match="lookahead.draft_tables=/dev/zero: is a pipe or a device; give a file"):
        LookaheadRuntime(model_dir, lookahead=settings("/dev/zero"), **OPTIONS)


def load_twice(group, *files: str) -> list[list[int | str]]:
    """Return the stamps of the tables that a rank loads from each file, or the errors.

    Each file is loaded at the start, and after a restart.
    """

    def load(file: str, is_start: bool) -> int | str:
        try:
            return DraftStore(Path(file), 1 << 16, 300).load(group, is_start).stamp
        except ConfigError as error:
            return str(error)

    return [[load(file, is_start) for is_start in (True, False)] for file in files]


@pytest.fixture(scope="module")
def loaded_by_ranks(tmp_path_factory) -> list[list[list[int | str]]]:
    """Return what each of two ranks loads, twice: from a file that two runtimes saved, and from a damaged one."""
    folder = tmp_path_factory.mktemp("drafts")
    store, damaged = DraftStore(folder / "tables", 1 << 16, 300), folder / "damaged"
    much, little = DraftTables(1 << 16), DraftTables(1 << 16)
    for _ in range(3):
        much.next_stamp()
    for tables in (much, little):
        store.save(tables)
    damaged.write_bytes(b"damaged")
    return run_ranks(load_twice, 2, str(store.path), str(damaged))


def test_file_keeps_the_tables_that_have_learned_most(loaded_by_ranks):
    assert [saved for saved, _ in loaded_by_ranks] == [[3, 3]] * 2


def test_larger_tables_saved_while_another_process_saves_are_kept(tmp_path, monkeypatch):
    """The other process, here a thread, comes between the look at the file and the write."""
    store, much, little = DraftStore(tmp_path / "tables", 1 << 16, 300), DraftTables(1 << 16), DraftTables(1 << 16)
    much.next_stamp()
    other = threading.Thread(target=store.save, args=(much,))

    def look(path: Path) -> int:
        stamp = stored_stamp(path)
        if not other.ident:
            other.start()
            wait_until(lambda: not other.is_alive() or is_locked(tmp_path / "tables.lock"))
        return stamp

    monkeypatch.setattr(draft_store, "stored_stamp", look)
    store.save(little)
    other.join()
    assert stored_stamp(store.path) == much.stamp > little.stamp


def test_damaged_file_is_refused_at_start_and_replaced_after_a_restart(loaded_by_ranks):
    (one, first), (other, second) = (damaged for _, damaged in loaded_by_ranks)
    assert one == other and one.endswith("it is not saved draft tables; give another path, or delete it")
    assert first == second == 0
