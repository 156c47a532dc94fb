"""A request continues with the draft tables of another only if their text or their scope is the same."""

import weakref

from lp_runtime.decoder.draft_pool import MAX_KEPT, STORED_TAG, DraftPool
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables

BYTES = 1 << 16


def known_before(pool: DraftPool, scope: str | None, next_tag: int, tag: int = 0, num_bytes: int = BYTES) -> int:
    """Return the number of tokens in a request's tables before it adds three, under the next tag."""
    tables = pool.acquire(num_bytes, pool.find(tag, scope, num_bytes))
    known = int(tables.text.span[1])
    tables.begin_text([1, 2, 3])
    pool.release(tables, next_tag, scope)
    return known


def test_requests_of_same_scope_reuse_latest_tables():
    pool = DraftPool()
    assert [known_before(pool, "a", tag) for tag in (1, 2, 3)] == [0, 3, 6]
    assert known_before(pool, "b", 4) == 0, "another scope"
    assert known_before(pool, None, 5) == 0, "none at all"
    assert known_before(pool, "a", 6, num_bytes=2 * BYTES) == 0, "another size"
    assert known_before(pool, "a", 7) == 9


def test_request_that_continues_text_reuses_its_tables():
    pool = DraftPool()
    assert known_before(pool, None, 1) == 0
    assert known_before(pool, "a", 2) == 0
    assert known_before(pool, "a", 3, tag=1) == 3, "the text comes before the scope"
    assert known_before(pool, "a", 4) == 6, "which it then belongs to"
    assert known_before(pool, "a", 5, tag=4, num_bytes=2 * BYTES) == 0, "its tables have another size"


def test_unused_tables_are_freed_for_tables_of_another_size():
    pool = DraftPool()
    tables = pool.acquire(BYTES)
    pool.release(tables)
    assert pool.acquire(BYTES) is tables
    pool.release(tables)
    unused = weakref.ref(tables)
    del tables
    assert pool.acquire(2 * BYTES).num_bytes == 2 * BYTES
    assert unused() is None


def test_tables_without_tag_are_not_kept():
    pool = DraftPool()
    tables = pool.acquire(BYTES)
    tables.begin_text([1, 2, 3])
    pool.release(tables, 0, "a")
    assert known_before(pool, "a", 1) == 0


def test_concurrent_requests_use_different_tables():
    pool = DraftPool()
    pool.release(pool.acquire(BYTES), 1, "a")
    first, second = (pool.acquire(BYTES, pool.find(0, "a", BYTES)) for _ in range(2))
    assert first is not second and pool.num_in_use == 2


def test_pool_keeps_only_latest_tables():
    pool = DraftPool()
    for tag in range(10, 50):
        pool.release(pool.acquire(BYTES), tag)
    assert [tag for tag in range(10, 50) if pool.find(tag, None, BYTES)] == list(range(50 - MAX_KEPT, 50))


def test_stored_tables_serve_requests_without_salt():
    stored = DraftTables(BYTES)
    pool = DraftPool(stored)
    assert pool.most_learned("") is stored and pool.find(0, "", BYTES) == STORED_TAG
    assert not pool.find(0, "a", BYTES)


def test_file_gets_the_tables_that_have_learned_most_and_a_request_the_latest():
    """A replica that was restarted has the latest ones only, and all replicas must continue with the same."""
    pool = DraftPool()
    one, other = pool.acquire(BYTES), pool.acquire(BYTES)  # two requests at the same time
    for _ in range(3):
        one.next_stamp()
    other.next_stamp()
    pool.release(one, 1, "")
    pool.release(other, 2, "")
    assert pool.most_learned("") is one and pool.acquire(BYTES, pool.find(0, "", BYTES)) is other
