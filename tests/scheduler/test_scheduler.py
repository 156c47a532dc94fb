"""Many requests on one runtime: each has the output that it has alone, on whatever replicas it runs.

If timing matters, requests are held after their first delta (held_runtime.py), so that no check depends on their speed.
Their outputs are compared to the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from held_runtime import HeldRuntime, first_delta
from support import reference
from support.gate import Gate
from support.processes import in_fork, one_core, wait_until

from lp_runtime import (
    BusyError,
    ConfigError,
    ConstraintConfig,
    DeadlineError,
    Job,
    LookaheadConfig,
    LookaheadRuntime,
    ReplicaError,
    SamplingConfig,
    Scheduler,
)
from lp_runtime.config.settings import FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.request.request import Request
from lp_runtime.scheduler.job import JobState

FIXED = LookaheadConfig(7, 5, 7, prior="none")
SLOW = LookaheadConfig(0, 2, 0)
GPUS = 3
PROMPTS = ["def fib(n):\n    ", *reference.PROMPTS[1:]]  # of one chunk and of several
SHORT, MEDIUM, LONG = 12, 24, 96  # new tokens
SAMPLINGS = (SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.8, seed=3))
Case = tuple[int, int, int]  # prompt, new tokens, sampling
CASES: list[Case] = [
    (prompt, length, sampling) for prompt in range(3) for length in (SHORT, MEDIUM) for sampling in range(2)
]
LONG_CASES: list[Case] = [(prompt, LONG, sampling) for prompt in range(2) for sampling in range(2)]


def start(model_dir: Path, gpus: int) -> LookaheadRuntime:
    failure = FailureConfig(timeout=5.0, restarts=100)
    model = ModelConfig(str(model_dir), prefill_chunk=8)
    return LookaheadRuntime.from_config(
        RuntimeConfig(model, gpus=gpus, device="cpu", dtype="float32", lookahead=FIXED, failure=failure)
    )


def make(runtime: LookaheadRuntime | HeldRuntime, case: Case, **options) -> Request:
    prompt, length, sampling = case
    return runtime.request(PROMPTS[prompt], length, eos=False, sampling=SAMPLINGS[sampling], **options)


@pytest.fixture(scope="module")
def alone(single) -> dict[Case, list[int]]:
    """Token ids of CASES, decoded alone on one replica; a shorter output is a prefix of a longer one."""
    longest = {case: decode(single, case) for case in CASES if case[1] == MEDIUM}
    return {(prompt, length, each): longest[prompt, MEDIUM, each][:length] for prompt, length, each in CASES}


@pytest.fixture(scope="module")
def alone_long(single) -> dict[Case, list[int]]:
    """Token ids of LONG_CASES, decoded alone on one replica."""
    return {case: decode(single, case) for case in LONG_CASES}


def decode(runtime: LookaheadRuntime, case: Case) -> list[int]:
    return [token for delta in runtime.stream_request(make(runtime, case)) for token in delta.token_ids]


def rest_of(job: Job) -> list[int]:
    """Return the token ids of a job that its reader has not read yet."""
    return [token for delta in job for token in delta.token_ids]


@pytest.fixture(scope="module")
def team(small_demo_dir):
    with start(small_demo_dir, GPUS) as runtime:
        yield runtime


@pytest.fixture
def runtime(team):
    """Three replicas, all of them ready."""
    wait_until(lambda: team.num_ready == GPUS)
    return team


@pytest.fixture
def held(runtime):
    """The three replicas, with a way to hold requests."""
    return HeldRuntime(runtime)


@pytest.fixture(scope="module")
def single(small_demo_dir):
    """One replica, in this process."""
    with start(small_demo_dir, 1) as runtime:
        yield runtime


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_job_cancelled_during_prefill_returns_no_tokens(runtime, alone, gpus):
    """A cancelled job gets no token: its prefill checks for cancellation before each of its 500 chunks."""
    with Scheduler(runtime, policy="fair") as scheduler:
        job = scheduler.submit(runtime.request([5 + number % 1000 for number in range(4000)], 8, eos=False), gpus=gpus)
        wait_until(lambda: job.on_cancel)  # the replicas have the request
        job.cancel()
        with pytest.raises(ReplicaError, match="the request was cancelled"):
            assert not list(job)
        assert scheduler.submit(make(runtime, CASES[0])).result().token_ids == alone[CASES[0]]
        assert scheduler.totals.requests == {"cancelled": 1, "length": 1}


def test_job_on_the_replica_of_this_process_is_cancelled_during_its_prefill(single):
    with Scheduler(single) as scheduler:
        job = scheduler.submit(single.request([5 + number % 1000 for number in range(4000)], 8, eos=False))
        wait_until(lambda: job.state is JobState.RUNNING)
        job.cancel()
        with pytest.raises(ReplicaError, match="the request was cancelled"):
            assert not list(job)


@pytest.mark.parametrize(
    "policy, max_batch",
    [
        ("fair", 2),
        pytest.param("latency", 8, marks=pytest.mark.slow),
        pytest.param("throughput", 1, marks=pytest.mark.slow),
        ("throughput", 8),
    ],
)
def test_outputs_match_requests_decoded_alone(alone, runtime, policy, max_batch):
    rng = random.Random(0)
    cases = rng.choices(CASES, k=9)
    seen, batches = [], [0]
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


def test_more_requests_than_replicas_are_batched(alone, held):
    cases = [case for case in CASES if case[1] == MEDIUM]
    with Scheduler(held, max_batch=2) as scheduler:
        jobs = held.submit_all(scheduler, [make(held, case, lookahead=SLOW) for case in cases])
        firsts = [first_delta(job) for job in jobs]
        assert len(cases) == 2 * GPUS and scheduler.batches == [2] * GPUS
        with pytest.raises(BusyError):
            scheduler.submit_all([make(held, cases[0])] * 65)
        held.release(*jobs)
        for case, job, first in zip(cases, jobs, firsts, strict=True):
            assert first + rest_of(job) == alone[case]


@pytest.mark.slow
def test_requests_sharing_replica_spread_out_when_others_end(alone_long, held):
    cases = LONG_CASES[: GPUS + 1]
    with Scheduler(held, policy="throughput", max_batch=8) as scheduler:
        jobs = [held.submit(scheduler, make(held, case, lookahead=SLOW)) for case in cases]
        firsts = [first_delta(job) for job in jobs]
        assert sorted(scheduler.batches) == [1, 1, 2]
        replicas = [scheduler.replicas_of(job) for job in jobs]
        ending = next(job for job, members in zip(jobs, replicas, strict=True) if replicas.count(members) == 1)
        ending.cancel()
        wait_until(lambda: scheduler.batches == [1, 1, 1])
        held.release(*jobs)
        for case, job, first in zip(cases, jobs, firsts, strict=True):
            if job is not ending:
                assert first + rest_of(job) == alone_long[case]
                assert job.generation.losses == 0


def test_request_in_this_process_counts_as_one_replica(single):
    held = HeldRuntime(single)
    with Scheduler(held) as scheduler:
        job = held.submit(scheduler, make(held, CASES[0]))
        first_delta(job)
        assert scheduler.degrees == [1] and scheduler.batches == [1]
        held.release(job)
        job.result()


@pytest.mark.parametrize(
    ("policy", "gpus", "degree"),
    [
        pytest.param("fair", 1, 1, marks=pytest.mark.slow),
        pytest.param("throughput", 2, 2, marks=pytest.mark.slow),
        pytest.param("latency", 2, 2, marks=pytest.mark.slow),
        ("fair", GPUS, GPUS),
    ],
)
def test_request_runs_on_requested_number_of_replicas(alone, held, policy, gpus, degree):
    case = (1, MEDIUM, 0)
    with Scheduler(held, policy=policy) as scheduler:
        job = held.submit(scheduler, make(held, case, lookahead=SLOW), gpus=gpus)
        tokens = first_delta(job)
        assert scheduler.degrees == [degree]
        for wrong in (0, GPUS + 1):
            with pytest.raises(ConfigError, match=f"gpus={wrong}: must be"):
                scheduler.submit(make(held, case), gpus=wrong)
        held.release(job)
        degrees = []
        for delta in job:
            tokens += delta.token_ids
            degrees.append(scheduler.degrees)
        assert tokens == alone[case]
        assert all(each in ([degree], []) for each in degrees)  # none once the job has ended


@pytest.mark.slow
def test_generate_many_and_streams_match_requests_decoded_alone(alone, runtime):
    cases = [case for case in CASES if case[1] == SHORT and case[2] == 0]
    prompts = [PROMPTS[prompt] for prompt, *_ in cases]

    async def main(scheduler: Scheduler):
        streamed = []
        async for delta in scheduler.stream_async(prompts[0], SHORT, eos=False):
            streamed += delta.token_ids
        return streamed, await scheduler.generate_many_async(prompts * 2, SHORT, eos=False)

    with Scheduler(runtime, max_waiting=1, max_batch=1) as scheduler:
        many = scheduler.generate_many(prompts * 3, SHORT, eos=False)
        assert [each.token_ids for each in many] == [alone[case] for case in cases] * 3
        streamed, many = asyncio.run(main(scheduler))
        assert streamed == alone[cases[0]] and [each.token_ids for each in many] == [alone[case] for case in cases] * 2
        with pytest.raises(ConfigError):
            scheduler.generate_many(prompts, 0)
        assert "".join(delta.text for delta in scheduler.stream(prompts[0], SHORT, eos=False)) == many[0].text


@pytest.mark.slow
def test_batch_is_resumed_after_restart_of_single_replica_process(alone_long, small_demo_dir):
    model, launcher = ModelConfig(str(small_demo_dir)), LauncherConfig(own_process=True)
    config = RuntimeConfig(model, gpus=1, device="cpu", dtype="float32", lookahead=SLOW, launcher=launcher)
    cases = LONG_CASES[:3]
    with one_core(), LookaheadRuntime.from_config(config) as runtime:
        held = HeldRuntime(runtime)
        with Scheduler(held) as scheduler:
            jobs = [held.submit(scheduler, make(held, case)) for case in cases]
            firsts = [first_delta(job) for job in jobs]
            os.kill(runtime.launcher.process_ids[0], signal.SIGKILL)  # long before LONG tokens are decoded
            assert scheduler.batches == [3]
            held.release(*jobs)
            for case, job, first in zip(cases, jobs, firsts, strict=True):
                assert first + rest_of(job) == alone_long[case]
                assert job.generation.losses == 1


@pytest.mark.slow
def test_request_gives_up_replica_for_newcomer_without_loss(alone, alone_long, held):
    long, short = (1, LONG, 0), (2, SHORT, 1)
    with Scheduler(held) as scheduler:
        job = held.submit(scheduler, make(held, long, lookahead=SLOW))
        tokens = first_delta(job)
        assert scheduler.degrees == [3]
        other = held.submit(scheduler, make(held, short))
        wait_until(lambda: scheduler.degrees == [2])
        held.release(job)  # it leaves the replica that the other one waits for
        other_tokens = first_delta(other)
        held.release(other)
        assert other_tokens + rest_of(other) == alone[short]
        assert tokens + rest_of(job) == alone_long[long]
        assert job.generation.losses == 0
        job = scheduler.submit(make(held, long))
        assert job.result().token_ids == alone_long[long]


@pytest.mark.slow
def test_freed_replicas_join_running_request(alone_long, held):
    first, second = (0, LONG, 0), (1, LONG, 0)
    with Scheduler(held) as scheduler:
        jobs = [
            held.submit(scheduler, make(held, case, lookahead=SLOW), gpus=gpus)
            for case, gpus in ((first, 1), (second, GPUS))
        ]
        tokens = [first_delta(job) for job in jobs][1]
        assert scheduler.degrees == [1, 2]
        jobs[0].cancel()
        wait_until(lambda: scheduler.degrees == [GPUS])
        held.release(jobs[1])
        assert tokens + rest_of(jobs[1]) == alone_long[second] and jobs[1].generation.losses == 0


@pytest.mark.parametrize("num_jobs", [pytest.param(GPUS, marks=pytest.mark.slow), GPUS + 1])
def test_request_on_lost_replica_is_resumed_under_load(alone, held, num_jobs, tmp_path):
    """The replica of the last job is killed after that job's first token."""
    cases = [case for case in CASES if case[1] == MEDIUM][:num_jobs]
    gate = Gate(tmp_path, len(make(held, cases[-1]).prompt_ids))
    with Scheduler(held, policy="throughput") as scheduler:
        jobs = [held.submit(scheduler, make(held, case, lookahead=SLOW)) for case in cases[:-1]]
        firsts = [first_delta(job) for job in jobs]
        jobs.append(held.submit(scheduler, make(held, cases[-1], lookahead=SLOW, processors=[gate])))
        firsts.append(first_delta(jobs[-1]))
        gate.wait_until_held()
        victims = scheduler.replicas_of(jobs[-1])
        for index in victims:
            os.kill(held.launcher.process_ids[index], signal.SIGKILL)
        gate.open()
        assert len(scheduler.degrees) == num_jobs
        held.release(*jobs)
        for case, job, first in zip(cases, jobs, firsts, strict=True):
            assert first + rest_of(job) == alone[case]
        assert jobs[-1].generation.losses == len(victims) == 1


@pytest.mark.slow
def test_random_arrivals_and_cancellations_keep_outputs(alone, runtime):
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
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(client, [rng.randrange(1000) for _ in range(5)]))  # raises what a client's assertion does
        wait_until(lambda: not scheduler.num_running)
        totals = scheduler.totals.requests
        assert sum(totals.values()) == 25 and totals["length"] >= len(done) > 5


@pytest.mark.parametrize("kind", [pytest.param("single", marks=pytest.mark.slow), "runtime"])
def test_cancelled_expired_and_excess_jobs_raise_errors(request, alone, kind):
    held = HeldRuntime(request.getfixturevalue(kind))
    case = (1, MEDIUM, 0)
    with Scheduler(held, max_waiting=2, policy="latency") as scheduler:
        running = held.submit(scheduler, make(held, case, lookahead=SLOW))
        first_delta(running)
        assert scheduler.totals.new_tokens > 0 and scheduler.totals.steps > 0  # although no job has ended
        given_up, late = scheduler.submit(make(held, case)), scheduler.submit(make(held, case))
        assert (running.state, late.state) == (JobState.RUNNING, JobState.WAITING)
        with pytest.raises(BusyError, match="busy: 2 requests are waiting, and at most 2 may"):
            scheduler.submit(make(held, case))
        for job in (given_up, late):
            job.cancel()
            with pytest.raises(ReplicaError, match="cancelled before it began"):
                job.result()
        late = scheduler.submit(make(held, case), timeout=0.01)
        with pytest.raises(DeadlineError, match="did not begin before its deadline"):
            late.result()
        running.cancel()
        with pytest.raises(ReplicaError, match="the request was cancelled"):
            running.result()
        assert running.state is JobState.FINISHED
        assert scheduler.submit(make(held, case)).result().token_ids == alone[case]
        assert scheduler.totals.requests == {"cancelled": 3, "expired": 1, "length": 1}
        left = held.submit(scheduler, make(held, case, lookahead=SLOW))
        first_delta(left)
    with pytest.raises(ReplicaError):
        left.result()
    with pytest.raises(ReplicaError, match="the scheduler is closed"):
        scheduler.submit(make(held, case))


def test_async_deltas_match_requests_decoded_alone(alone, runtime):
    async def ask(scheduler: Scheduler, case: tuple[int, int, int]) -> list[int]:
        job = scheduler.submit(make(runtime, case))
        return [token async for delta in job.deltas() for token in delta.token_ids]

    async def give_up(scheduler: Scheduler) -> None:
        job = scheduler.submit(make(runtime, (1, MEDIUM, 0), lookahead=SLOW))
        deltas = job.deltas()
        await anext(deltas)
        await deltas.aclose()
        assert job.is_cancelled

    async def main(scheduler: Scheduler) -> None:
        outputs = await asyncio.gather(*(ask(scheduler, case) for case in CASES[:6]), give_up(scheduler))
        assert outputs[:6] == [alone[case] for case in CASES[:6]]

    with Scheduler(runtime) as scheduler:
        asyncio.run(main(scheduler))


def test_requests_fail_at_once_when_no_replica_is_left(small_demo_dir):
    model, failure = ModelConfig(str(small_demo_dir)), FailureConfig(restarts=0)
    config = RuntimeConfig(model, gpus=2, device="cpu", dtype="float32", lookahead=SLOW, failure=failure)
    with LookaheadRuntime.from_config(config) as runtime:
        held = HeldRuntime(runtime)
        with Scheduler(held) as scheduler:
            jobs = [held.submit(scheduler, make(held, (1, LONG, 0))) for _ in range(3)]
            first_delta(jobs[0])
            for pid in runtime.launcher.process_ids.values():
                os.kill(pid, signal.SIGKILL)
            held.release(*jobs)
            for job in jobs:
                with pytest.raises(ReplicaError):
                    job.result()
            with pytest.raises(ReplicaError, match="no replica is left"):
                scheduler.submit(make(held, (1, MEDIUM, 0))).result()
            assert not scheduler.is_healthy


def test_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="policy=quick: must be one of fair, latency, throughput"):
        Scheduler(None, policy="quick")


@pytest.mark.slow
def test_request_moves_from_busy_replica_to_idle_one(alone, alone_long, small_demo_dir):
    """The busy replica is a process that is stopped: it sends nothing, and is not taken for lost either."""
    model, failure = ModelConfig(str(small_demo_dir)), FailureConfig(timeout=1000.0, heartbeat=1000.0)
    config = RuntimeConfig(model, gpus=2, device="cpu", dtype="float32", lookahead=FIXED, failure=failure)
    with LookaheadRuntime.from_config(config) as runtime:
        held = HeldRuntime(runtime)
        with Scheduler(held, policy="throughput", max_batch=8) as scheduler:
            jobs = [held.submit(scheduler, make(held, case, lookahead=SLOW)) for case in LONG_CASES[:2]]
            firsts = [first_delta(job) for job in jobs]
            busy = next(job for job in jobs if 0 in scheduler.replicas_of(job))
            ending = next(job for job in jobs if job is not busy)
            os.kill(runtime.launcher.process_ids[0], signal.SIGSTOP)
            try:
                waiting = scheduler.submit(make(held, CASES[0]))
                wait_until(lambda: scheduler.batches == [2, 1])
                ending.cancel()
                answer: list[int] = []
                reader = threading.Thread(target=lambda: answer.extend(rest_of(waiting)), daemon=True)
                reader.start()
                wait_until(lambda: not reader.is_alive())
                assert answer == alone[CASES[0]] and waiting.generation.losses == 0
            finally:
                os.kill(runtime.launcher.process_ids[0], signal.SIGCONT)
            held.release(busy)
            assert firsts[jobs.index(busy)] + rest_of(busy) == alone_long[LONG_CASES[jobs.index(busy)]]


def test_forked_process_is_refused_and_leaves_the_replicas_alone(runtime, single, alone):
    """A fork copies none of the threads that drive requests, and shares the pipes to replicas."""
    case, ours = CASES[0], os.getpid()
    pids = runtime.launcher.process_ids
    with Scheduler(single) as lone, Scheduler(runtime) as scheduler:
        requests = make(single, case), make(runtime, case)
        answers = in_fork(
            lambda: lone.submit(requests[0], timeout=5).result(),
            lambda: scheduler.submit(requests[1], timeout=5).result(),
            lambda: list(runtime.stream_request(requests[1])),
            lambda: runtime.request("a", constraint=ConstraintConfig(regex="a")),
            scheduler.close,
            runtime.close,
            lambda: list(single.stream_request(requests[0]))[-1].token_ids[-1],
        )
        whose = ["the scheduler"] * 2 + ["the runtime"] * 2
        refusals = [f"ReplicaError: {each} belongs to process {ours}: create it after the fork" for each in whose]
        assert answers == [*refusals, "None", "None", str(alone[case][-1])]
        assert scheduler.submit(requests[1]).result().token_ids == alone[case]
    assert runtime.launcher.process_ids == pids and runtime.num_ready == GPUS


def test_ended_requests_leave_no_threads(single):
    """A server answers millions of them."""
    held = HeldRuntime(single)
    with Scheduler(held) as scheduler:
        before = set(threading.enumerate())
        job = held.submit(scheduler, make(held, (0, SHORT, 0)))
        first_delta(job)
        (thread,) = map(weakref.ref, set(threading.enumerate()) - before)
        held.release(job)
        rest_of(job)
        wait_until(lambda: thread() is None)


def test_scheduler_that_is_dropped_ends_its_thread_after_its_last_job(single, alone):
    case: Case = (0, SHORT, 0)
    before = set(threading.enumerate())
    scheduler = Scheduler(single)
    (thread,) = set(threading.enumerate()) - before
    kept = weakref.ref(scheduler)
    job = scheduler.submit(make(single, case))
    del scheduler
    assert rest_of(job) == alone[case]
    wait_until(lambda: kept() is None and not thread.is_alive())
