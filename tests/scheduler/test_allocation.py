"""The allocation of replicas to jobs: how many each should have."""

from __future__ import annotations

from lp_runtime.scheduler.allocation import target_degrees


def test_replicas_go_round_until_every_job_has_its_largest_degree():
    assert [target_degrees(4, [4] * jobs) for jobs in (1, 2, 3, 4, 5)] == [
        [4],
        [2, 2],
        [2, 1, 1],
        [1, 1, 1, 1],
        [1] * 5,
    ]
    assert target_degrees(3, [1, 1]) == [1, 1] and target_degrees(3, [8]) == [3] and target_degrees(1, []) == []
    assert target_degrees(8, [1, 3, 8]) == [1, 3, 4] and target_degrees(8, [2, 2]) == [2, 2]
