"""Many requests on one runtime: every output is the one it has alone, however the replicas are divided."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time

import pytest
from support import reference
from support.processes import one_core, wait_until

from lp_runtime import (
    BusyError,
    ConfigError,
    DeadlineError,
    LookaheadConfig,
    LookaheadRuntime,
    ReplicaError,
    SamplingConfig,
    Scheduler,
)
from lp_runtime.config.settings import FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.scheduler.allocation import target_degrees
from lp_runtime.scheduler.job import Job, Share
from lp_runtime.scheduler.lp_degree import FIRST_RETRY, DegreeSpeeds, candidates

FIXED = LookaheadConfig(7, 5, 7, prior="none")
SLOW = LookaheadConfig(0, 2, 0)
GPUS = 3
LENGTHS = (40, 160)
SAMPLINGS = (SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.8, seed=3))
CASES = [(prompt, length, sampling) for prompt in range(3) for length in LENGTHS for sampling in range(2)]


def start(gpus: int) -> LookaheadRuntime:
    failure = FailureConfig(timeout=5.0, restarts=100)
    return LookaheadRuntime.from_config(
        RuntimeConfig(
            ModelConfig(prefill_chunk=4), gpus=gpus, device="cpu", dtype="float32", lookahead=FIXED, failure=failure
        )
    )


def make(runtime: LookaheadRuntime, case: tuple[int, int, int], **options):
    prompt, length, sampling = case
    return runtime.request(reference.PROMPTS[prompt], length, eos=False, sampling=SAMPLINGS[sampling], **options)


@pytest.fixture(scope="module")
def alone():
    """Token ids of every case, one after another on one replica."""
    with start(1) as runtime:
        return {case: decode(runtime, case) for case in CASES}


def decode(runtime: LookaheadRuntime, case: tuple[int, int, int]) -> list[int]:
    return [token for piece in runtime.stream_request(make(runtime, case)) for token in piece.token_ids]


@pytest.fixture(scope="module")
def team():
    with start(GPUS) as runtime:
        yield runtime


@pytest.fixture
def runtime(team):
    """Three replicas, all of them there."""
    wait_until(lambda: not team.launcher.num_loading)
    return team


@pytest.mark.parametrize("gpus", [1, 3])
def test_cancelled_while_its_prompt_is_fed(runtime, alone, gpus):
    """No token comes of it any more: a prompt of 1,500 tokens takes longer than to say so."""
    with Scheduler(runtime, policy="fair") as scheduler:
        long = runtime.request([5 + number % 1000 for number in range(1500)], 8, eos=False)
        job = scheduler.submit(long, gpus=gpus)
        wait_until(lambda: scheduler.num_running == 1)
        time.sleep(0.2)
        job.cancel()
        with pytest.raises(ReplicaError, match="the request was cancelled"):
            assert not list(job)
        assert scheduler.submit(make(runtime, CASES[0])).result().token_ids == alone[CASES[0]]
        assert scheduler.totals.requests == {"cancelled": 1, "length": 1}


@pytest.fixture(scope="module")
def single():
    """One replica, in this process."""
    with start(1) as runtime:
        yield runtime


@pytest.mark.parametrize("policy, max_batch", [("fair", 2), ("latency", 8), ("throughput", 1), ("throughput", 8)])
def test_outputs_are_those_of_requests_alone(alone, runtime, policy, max_batch):
    rng = random.Random(0)
    cases = rng.choices(CASES, k=9)
    seen, batches = [], []
    with Scheduler(runtime, policy=policy, max_batch=max_batch) as scheduler:
        jobs = []
        for case in cases:
            jobs.append(scheduler.submit(make(runtime, case)))
            seen.append(scheduler.degrees)
        for case, job in zip(cases, jobs, strict=True):
            assert job.result().token_ids == alone[case]
            seen.append(scheduler.degrees)
            batches += scheduler.batches
        assert scheduler.totals.requests == {"length": len(cases)}
        assert scheduler.totals.new_tokens == sum(len(alone[case]) for case in cases)
    most = 1 if policy == "latency" else max_batch * GPUS
    assert all(len(each) <= most for each in seen) and max(batches) <= max_batch
    assert all(sum(each) <= GPUS or set(each) == {1} for each in seen)


def test_more_requests_than_replicas_share_them(alone, runtime):
    cases = [case for case in CASES if case[1] == 160]
    with Scheduler(runtime, max_batch=2) as scheduler:
        jobs = [scheduler.submit(make(runtime, case, lookahead=SLOW)) for case in cases]
        firsts = [iter(job) for job in jobs]
        tokens = [list(next(first).token_ids) for first in firsts]  # all of them run at once
        assert len(cases) == 2 * GPUS and scheduler.batches == [2] * GPUS
        with pytest.raises(BusyError):
            scheduler.submit_all([make(runtime, cases[0])] * 65)
        for case, pieces, known in zip(cases, firsts, tokens, strict=True):
            assert known + [token for piece in pieces for token in piece.token_ids] == alone[case]


def test_requests_that_share_a_replica_part_as_others_end(alone, runtime):
    cases = [case for case in CASES if case[1] == 160][:4]
    with Scheduler(runtime, policy="throughput", max_batch=8) as scheduler:
        jobs = [scheduler.submit(make(runtime, case, lookahead=SLOW)) for case in cases]
        firsts = [iter(job) for job in jobs]
        tokens = [list(next(first).token_ids) for first in firsts]
        assert sorted(scheduler.batches) == [1, 1, 2]
        alone_on = [index for index in range(GPUS) if sum(index in share.wanted for share in scheduler._running) == 1]
        ending = next(share.job for share in scheduler._running if share.wanted == {alone_on[0]})
        ending.cancel()
        wait_until(lambda: scheduler.batches == [1, 1, 1])
        for case, job, pieces, known in zip(cases, jobs, firsts, tokens, strict=True):
            if job is not ending:
                assert known + [token for piece in pieces for token in piece.token_ids] == alone[case]
                assert job.generation.losses == 0


def test_a_request_says_how_many_replicas_it_wants(alone, runtime):
    case = (1, 160, 0)
    for policy, gpus, degree in (("fair", 1, 1), ("throughput", 2, 2), ("latency", 2, 2), ("fair", GPUS, GPUS)):
        with Scheduler(runtime, policy=policy) as scheduler:
            job = scheduler.submit(make(runtime, case, lookahead=SLOW), gpus=gpus)
            degrees = [scheduler.degrees for _ in job]
            assert set(map(tuple, degrees)) <= {(degree,), ()} and (degree,) in map(tuple, degrees)
            for wrong in (0, GPUS + 1):
                with pytest.raises(ConfigError, match=f"gpus={wrong}: must be"):
                    scheduler.submit(make(runtime, case), gpus=wrong)


def test_many_prompts_at_once(alone, runtime):
    cases = [case for case in CASES if case[1] == 40 and case[2] == 0]
    prompts = [reference.PROMPTS[prompt] for prompt, *_ in cases]

    async def main(scheduler: Scheduler):
        streamed = []
        async for piece in scheduler.stream_async(prompts[0], 40, eos=False):
            streamed += piece.token_ids
        return streamed, await scheduler.generate_many_async(prompts * 2, 40, eos=False)

    with Scheduler(runtime, max_waiting=1, max_batch=1) as scheduler:
        found = scheduler.generate_many(prompts * 3, 40, eos=False)
        assert [each.token_ids for each in found] == [alone[case] for case in cases] * 3
        streamed, found = asyncio.run(main(scheduler))
        assert streamed == alone[cases[0]] and [each.token_ids for each in found] == [alone[case] for case in cases] * 2
        with pytest.raises(ConfigError):
            scheduler.generate_many(prompts, 0)
        assert "".join(piece.text for piece in scheduler.stream(prompts[0], 40, eos=False)) == found[0].text


def test_one_replica_of_its_own_process_takes_several_and_comes_back(alone):
    config = RuntimeConfig(
        gpus=1, device="cpu", dtype="float32", lookahead=SLOW, launcher=LauncherConfig(own_process=True)
    )
    cases = [case for case in CASES if case[1] == 160][:3]
    with one_core(), LookaheadRuntime.from_config(config) as runtime, Scheduler(runtime) as scheduler:
        jobs = [scheduler.submit(make(runtime, case)) for case in cases]
        firsts = [iter(job) for job in jobs]
        tokens = [list(next(first).token_ids) for first in firsts]
        assert scheduler.batches == [3]
        os.kill(runtime.launcher._processes[0].pid, signal.SIGKILL)
        for case, job, pieces, known in zip(cases, jobs, firsts, tokens, strict=True):
            assert known + [token for piece in pieces for token in piece.token_ids] == alone[case]
            assert job.generation.losses == 1


def test_the_fastest_degree_is_found_and_kept():
    def run(speeds: DegreeSpeeds, tokens_per_second: dict[int, float], num_requests: int) -> list[int]:
        chosen = []
        for _ in range(num_requests):
            degree = speeds.choose(max(tokens_per_second))
            chosen.append(degree)
            speeds.note(degree, 128, 128 / tokens_per_second[degree])
        return chosen

    assert candidates(1) == [1] and candidates(6) == [6, 3, 1]
    speeds = DegreeSpeeds()
    speeds.note(1, 1000, 1.0)
    assert speeds.best(4) == 4, "what all of them together do is not known"
    speeds = DegreeSpeeds()
    assert speeds.best(4) == 4
    crowded = {4: 80.0, 2: 150.0, 1: 160.0}
    chosen = run(speeds, crowded, 200)
    assert chosen[:3] == [4, 2, 1] and speeds.best(4) == 1
    assert chosen.count(1) > 180 and {2, 4} <= set(chosen[3 + FIRST_RETRY - 3 :])
    assert run(speeds, {4: 400.0, 2: 300.0, 1: 160.0}, 2000).count(4) > 1600 and speeds.best(4) == 4


def test_a_request_gives_replicas_up_and_gets_them_back(alone, runtime):
    long, short = (1, 160, 0), (2, 40, 1)
    with Scheduler(runtime) as scheduler:
        job = scheduler.submit(make(runtime, long, lookahead=SLOW))
        pieces = iter(job)
        tokens = list(next(pieces).token_ids)
        wait_until(lambda: scheduler.degrees == [3])
        other = scheduler.submit(make(runtime, short))
        seen = []
        thread = threading.Thread(target=lambda: seen.append(other.result()))
        thread.start()
        wait_until(lambda: sorted(scheduler.degrees) == [1, 2])
        tokens += [token for piece in pieces for token in piece.token_ids]
        thread.join()
        assert tokens == alone[long] and seen[0].token_ids == alone[short]
        assert job.generation.losses == 0
        job = scheduler.submit(make(runtime, long))
        assert job.result().token_ids == alone[long]


def test_more_replicas_join_a_running_request(alone, runtime):
    first, second = (0, 40, 0), (1, 160, 0)
    with Scheduler(runtime) as scheduler:
        jobs = [scheduler.submit(make(runtime, case, lookahead=SLOW)) for case in (first, second)]
        grown: list[list[int]] = []
        tokens: list[int] = []
        for piece in jobs[1]:
            tokens += piece.token_ids
            jobs[0].cancel()
            grown.append(list(scheduler.degrees))
        assert [GPUS] in grown, "the second request was never alone on all replicas"
        assert tokens == alone[second] and jobs[1].generation.losses == 0


@pytest.mark.parametrize("num_jobs", [GPUS, GPUS + 1])
def test_a_replica_lost_under_load(alone, runtime, num_jobs):
    cases = [case for case in CASES if case[1] == 160][:num_jobs]
    with Scheduler(runtime) as scheduler:
        jobs = [scheduler.submit(make(runtime, case, lookahead=SLOW)) for case in cases]
        pieces = iter(jobs[0])
        tokens = list(next(pieces).token_ids)
        wait_until(lambda: len(scheduler.degrees) == num_jobs)
        victims = sorted(scheduler._running[0].wanted)  # all that the first one has
        for index in victims:
            os.kill(runtime.launcher._processes[index].pid, signal.SIGKILL)
        tokens += [token for piece in pieces for token in piece.token_ids]
        assert tokens == alone[cases[0]] and jobs[0].generation.losses == len(victims)
        for case, job in zip(cases[1:], jobs[1:], strict=True):
            assert job.result().token_ids == alone[case]


def test_random_arrivals_and_ends(alone, runtime):
    rng = random.Random(1)
    with Scheduler(runtime, max_waiting=1000) as scheduler:

        def client(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(5):
                case = rng.choice(CASES)
                job = scheduler.submit(make(runtime, case, lookahead=rng.choice([FIXED, SLOW])))
                if rng.random() < 0.3:
                    for number, _ in enumerate(job):
                        if number == 2:
                            break
                    job.cancel()
                else:
                    assert job.result().token_ids == alone[case]
                    done.append(case)

        done: list = []
        threads = [threading.Thread(target=client, args=(rng.randrange(1000),)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: not scheduler.num_running)
        totals = scheduler.totals.requests
        assert sum(totals.values()) == 25 and totals["length"] >= len(done) > 5


@pytest.mark.parametrize("kind", ["single", "runtime"])
def test_cancelled_late_and_too_many(request, alone, kind):
    runtime = request.getfixturevalue(kind)
    case = (1, 160, 0)
    with Scheduler(runtime, max_waiting=2, policy="latency") as scheduler:
        running = scheduler.submit(make(runtime, case, lookahead=SLOW))
        next(iter(running))
        late = scheduler.submit(make(runtime, case), timeout=0.01)
        given_up = scheduler.submit(make(runtime, case))
        with pytest.raises(BusyError, match="busy: 2 requests are waiting, and at most 2 may"):
            scheduler.submit(make(runtime, case))
        given_up.cancel()
        with pytest.raises(ReplicaError, match="cancelled before it began"):
            given_up.result()
        with pytest.raises(DeadlineError, match="waited for too long"):
            late.result()
        running.cancel()
        with pytest.raises(ReplicaError, match="the request was cancelled"):
            running.result()
        assert scheduler.submit(make(runtime, case)).result().token_ids == alone[case]
        assert scheduler.totals.requests == {"cancelled": 2, "expired": 1, "length": 1}
        left = scheduler.submit(make(runtime, case, lookahead=SLOW))
        next(iter(left))
    with pytest.raises(ReplicaError):
        left.result()
    with pytest.raises(ReplicaError, match="the scheduler is closed"):
        scheduler.submit(make(runtime, case))


def test_asyncio(alone, runtime):
    async def ask(scheduler: Scheduler, case: tuple[int, int, int]) -> list[int]:
        job = scheduler.submit(make(runtime, case))
        return [token async for piece in job.pieces() for token in piece.token_ids]

    async def give_up(scheduler: Scheduler) -> None:
        job = scheduler.submit(make(runtime, (1, 160, 0), lookahead=SLOW))
        pieces = job.pieces()
        await anext(pieces)
        await pieces.aclose()
        assert job.is_cancelled

    async def main(scheduler: Scheduler) -> None:
        outputs = await asyncio.gather(*(ask(scheduler, case) for case in CASES[:6]), give_up(scheduler))
        assert outputs[:6] == [alone[case] for case in CASES[:6]]

    with Scheduler(runtime) as scheduler:
        asyncio.run(main(scheduler))


def test_where_a_job_is_and_is_to_be():
    share = Share(Job(None, None), [1], threading.Condition(), 1.0, lambda: True)
    assert share.held == {1} and not share.is_settled
    share.settle()
    assert share.is_settled
    share.take([0])
    assert share.held == {0, 1} and not share.is_settled
    share.shrink(1)  # it has not moved yet: it stays where it is, and 0 is free at once
    assert share.wanted == share.held == {1} and share.is_settled
    share.move_to([2])
    assert share.held == {1, 2}
    share.settle()
    assert share.held == {2}
    share.lose([2])
    assert not share.held


def test_how_replicas_are_divided():
    assert [target_degrees(4, [4] * jobs) for jobs in (1, 2, 3, 4, 5)] == [
        [4],
        [2, 2],
        [2, 1, 1],
        [1, 1, 1, 1],
        [1] * 5,
    ]
    assert target_degrees(3, [1, 1]) == [1, 1] and target_degrees(3, [8]) == [3] and target_degrees(1, []) == []
    assert target_degrees(8, [1, 3, 8]) == [1, 3, 4] and target_degrees(8, [2, 2]) == [2, 2]
    with pytest.raises(ConfigError, match="policy=quick: must be one of fair, latency, throughput"):
        Scheduler(None, policy="quick")


def test_with_no_replica_left_requests_fail_at_once():
    failure = FailureConfig(restarts=0)
    config = RuntimeConfig(gpus=2, device="cpu", dtype="float32", lookahead=SLOW, failure=failure)
    with LookaheadRuntime.from_config(config) as runtime, Scheduler(runtime) as scheduler:
        jobs = [scheduler.submit(make(runtime, (1, 160, 0))) for _ in range(3)]
        next(iter(jobs[0]))
        for process in list(runtime.launcher._processes.values()):
            os.kill(process.pid, signal.SIGKILL)
        for job in jobs:
            with pytest.raises(ReplicaError):
                job.result()
        with pytest.raises(ReplicaError, match="no replica is left"):
            scheduler.submit(make(runtime, (1, 160, 0))).result()
        assert not scheduler.is_healthy
