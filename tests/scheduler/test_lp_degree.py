"""The choice of an LP degree: the fastest one, while slower ones are retried from time to time."""

from __future__ import annotations

from lp_runtime.scheduler.lp_degree import FIRST_RETRY_REQUESTS, DegreeSpeeds, candidate_degrees


def test_fastest_lp_degree_is_chosen_and_others_are_retried():
    def run(speeds: DegreeSpeeds, tokens_per_second: dict[int, float], num_requests: int) -> list[int]:
        chosen = []
        for _ in range(num_requests):
            degree = speeds.choose(max(tokens_per_second))
            chosen.append(degree)
            speeds.record(degree, 128, 128 / tokens_per_second[degree])
        return chosen

    assert candidate_degrees(1) == [1] and candidate_degrees(6) == [6, 3, 1]
    speeds = DegreeSpeeds()
    speeds.record(1, 1000, 1.0)
    assert speeds.fastest(4) == 4, "the speed of all replicas together is not known"
    speeds = DegreeSpeeds()
    assert speeds.fastest(4) == 4
    crowded = {4: 80.0, 2: 150.0, 1: 160.0}
    chosen = run(speeds, crowded, 200)
    assert chosen[:3] == [4, 2, 1] and speeds.fastest(4) == 1
    assert chosen.count(1) > 180 and {2, 4} <= set(chosen[3 + FIRST_RETRY_REQUESTS - 3 :])
    assert run(speeds, {4: 400.0, 2: 300.0, 1: 160.0}, 2000).count(4) > 1600 and speeds.fastest(4) == 4
