"""Draft tables of requests: samples of one prompt go on with what an earlier one has found, and nobody else does."""

from lp_runtime.decoder.draft_pool import DraftPool

BYTES = 1 << 16


def remembered(pool: DraftPool, prompt: object, sample: int, num_bytes: int = BYTES) -> int:
    """Tokens that the tables of a request know before the request; it leaves three."""
    tables = pool.acquire(False, num_bytes, prompt, sample)
    known = int(tables.text.span[1])
    tables.begin_text([1, 2, 3])
    pool.release(tables)
    return known


def test_samples_of_a_prompt_share_what_they_found():
    pool = DraftPool()
    assert [remembered(pool, "a prompt", sample) for sample in range(3)] == [0, 3, 6]


def test_a_request_that_was_decoded_before_begins_afresh():
    pool = DraftPool()
    assert [remembered(pool, "a prompt", sample) for sample in (0, 1, 0, 1)] == [0, 3, 0, 3]


def test_other_prompts_and_sizes_begin_afresh():
    pool = DraftPool()
    assert remembered(pool, "a prompt", 0) == remembered(pool, "another", 1) == remembered(pool, "a prompt", 1) == 0
    assert remembered(pool, "a prompt", 2, 2 * BYTES) == 0
    assert remembered(pool, None, 0) == remembered(pool, None, 1) == 0


def test_samples_at_the_same_time_have_tables_of_their_own():
    pool = DraftPool()
    first, second = pool.acquire(False, BYTES, "a prompt", 0), pool.acquire(False, BYTES, "a prompt", 1)
    assert first is not second and pool.num_in_use == 2
