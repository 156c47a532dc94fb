"""Causes faults while a request is decoded: is its output right, and how long does no token arrive?

    python benchmarks/resilience.py faults --prompts humaneval.jsonl:prompt --rounds 3

Every round decodes one request on two replicas and causes one fault after some steps. The columns are rounds, those
whose request ended with an error, outputs that differ from an undisturbed run, replicas lost while decoding, and
milliseconds between two deltas: from the fault on (median and worst of the rounds' longest), and usually.

| fault | what happens |
| --- | --- |
| kill, stop | a replica gets SIGKILL or SIGSTOP |
| memory | a replica runs out of memory in one step (torch.OutOfMemoryError) |
| disk | cache_dir is on a full disk from the start |
| disconnect | the client of a stream disconnects; measures the time until nothing runs any more |
| sigterm | lp-serve gets SIGTERM; a later request must be refused with status 503 |
| ray_node | a Ray node is lost with its replica |
| delay, loss | the network between the replicas delays every packet (--delay-ms), or loses some (--loss) |
| partition | the network between the replicas stays cut; the driver reaches both |
| blip | the network is cut for --blip-seconds |

The four network faults put each replica into a network namespace, with gloo between them over a link of TUN devices
(network_link.py). A fault that this machine does not allow is a row with the reason. The exit status is 1 if an output
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import torch
from common import GREEDY, Results, Row, add_prompt_arguments, load_prompts, replica_processes
from support.faults import FailsOnce
from support.processes import RAY_SETTINGS
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config.settings import FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.errors import LookaheadError
from lp_runtime.launchers.spawn import SpawnHost
from lp_runtime.launchers.team import TeamLauncher
from lp_runtime.request.output import StepOutput
from lp_runtime.request.request import Request
from studies.kills import lose, wait_for_all
from studies.network_link import INTERFACE, Link, LinkError

FIXED = LookaheadConfig(7, 5, 7, prior="none")
PROCESS_FAULTS = ("kill", "stop", "memory")
NETWORK_FAULTS = ("delay", "loss", "partition", "blip")
FAULTS = (*PROCESS_FAULTS, "disk", "disconnect", "sigterm", "ray_node", *NETWORK_FAULTS)
RESTARTS = 1000  # per replica: enough for any number of rounds
DISK_KIB = 16  # size of the full disk
POLL_SECONDS = 0.002
REFUSAL = "the server is shutting down"  # status of /ready after SIGTERM
SERVE = "from lp_runtime.entrypoints.cli import serve_main; serve_main()"


@dataclass(frozen=True)
class Case:
    """A request with its right tokens and text."""

    request: Request
    expected: list[int]
    text: str


@dataclass
class Watched:
    """Deltas of a request as a client sees them.

    Attributes:
        token_ids: new tokens.
        times: time of every delta.
        error: message of the request's error; None if it succeeded.
        losses: number of replicas that were lost.
    """

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    losses: int = 0

    def read(self, deltas: Iterable[Sequence[int]], when: int = -1, cause: Callable[[], None] = lambda: None) -> None:
        """Read the deltas; call `cause` after delta number `when`."""
        try:
            for number, tokens in enumerate(deltas):
                self.token_ids += tokens
                self.times.append(time.perf_counter())
                if number == when:
                    cause()
        except LookaheadError as error:
            self.error = str(error)
            self.times.append(time.perf_counter())

    def waits(self) -> list[float]:
        """Return the milliseconds between each delta and the next one, or the error."""
        return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(self.times)]


class Rounds:
    """Rounds of one fault, and their row of the table."""

    def __init__(self, fault: str, expected: list[int], when: int):
        self._fault, self._expected, self._when = fault, expected, when
        self._watched: list[Watched] = []

    def add(self, watched: Watched) -> None:
        """Add a round."""
        self._watched.append(watched)

    @property
    def num_wrong(self) -> int:
        """Number of outputs that differ; after an error, the tokens must be a prefix of the right ones."""
        return sum(
            each.token_ids != self._expected[: len(each.token_ids) if each.error else None] for each in self._watched
        )

    def row(self) -> Row:
        """Return the row."""
        gaps = [max(each.waits()[self._when :], default=0.0) for each in self._watched]
        usual = [wait for each in self._watched for wait in each.waits()[: self._when]]
        row: Row = {
            "fault": self._fault,
            "rounds": len(gaps),
            "errors": sum(bool(each.error) for each in self._watched),
        }
        row |= {"outputs that differ": self.num_wrong, "losses": sum(each.losses for each in self._watched)}
        row |= {"median ms without a token": statistics.median(gaps), "worst": max(gaps)}
        errors = sorted({each.error for each in self._watched if each.error})
        return row | {"ms a step": statistics.median(usual) if usual else None, "remark": "; ".join(errors)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser, limit=1)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--when", type=int, default=3, help="steps before the fault")
    parser.add_argument("--timeout", type=float, default=FailureConfig.timeout, help="failure.timeout")
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--loss", type=float, default=0.05, help="share of packets that are lost")
    parser.add_argument("--blip-seconds", type=float, default=3.0)


def config_of(args: argparse.Namespace, **more: Any) -> RuntimeConfig:
    """Return the settings of a runtime of two replicas."""
    failure = FailureConfig(timeout=args.timeout, restarts=RESTARTS)
    settings: dict[str, Any] = {
        "model": ModelConfig(path=args.model),
        "lookahead": FIXED,
        "failure": failure,
        "gpus": 2,
    } | more
    return RuntimeConfig(device="cpu", dtype="float32", **settings)


def run(args: argparse.Namespace) -> int:
    """Cause every fault; return 1 if an output differs."""
    prompt = load_prompts(args)[0].turns[0]
    with LookaheadRuntime.from_config(config_of(args, gpus=1)) as runtime:
        request = runtime.request(prompt, args.max_new_tokens, eos=False, sampling=GREEDY)
        whole = runtime.generate(prompt, args.max_new_tokens, eos=False, sampling=GREEDY)
    case = Case(request, whole.token_ids, whole.text)
    results = Results("faults", args.output, dict.fromkeys(("median ms without a token", "worst", "ms a step"), ".0f"))
    num_wrong = 0
    for fault in args.faults:
        rounds = Rounds(fault, case.expected, args.when)
        cause = network_rounds if fault in NETWORK_FAULTS else OTHERS.get(fault, process_rounds)
        try:
            for watched in itertools.islice(cause(fault, case, args), args.rounds):
                rounds.add(watched)
        except (LinkError, OSError, ImportError) as error:
            results.add({"fault": fault, "remark": f"not run: {error}"})
            continue
        num_wrong += rounds.num_wrong
        results.add(rounds.row())
    results.finish(f"{args.max_new_tokens} new tokens, 2 replicas, failure.timeout={args.timeout:g}")
    return 1 if num_wrong else 0


def of_runtime(runtime: LookaheadRuntime, request: Request, when: int, cause: Callable[[], None]) -> Watched:
    """Decode a request on a runtime; cause the fault after delta number `when`."""
    watched, stream = Watched(), runtime.stream_request(request)
    watched.read((delta.token_ids for delta in stream), when, cause)
    watched.losses = stream.generation.losses if stream.generation is not None else 0
    return watched


def process_rounds(fault: str, case: Case, args: argparse.Namespace) -> Iterator[Watched]:
    """Yield rounds in which one replica is lost, or fails in a step."""
    with LookaheadRuntime.from_config(config_of(args)) as runtime, tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            victim = replica_processes()[number % 2]
            given, cause = case.request, lambda victim=victim: lose(victim, fault)
            if fault == "memory":
                cause = Path(folder, f"now {number}").touch
                failing = FailsOnce(Path(folder, f"now {number}"), victim.pid, torch.OutOfMemoryError)
                given = replace(case.request, processors=(failing,))
            yield of_runtime(runtime, given, args.when, cause)
            if fault != "memory":
                wait_for_all(runtime, victim)


def disk_rounds(fault: str, case: Case, args: argparse.Namespace) -> Iterator[Watched]:
    """Yield rounds of a runtime whose cache_dir is on a full disk."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KIB}k", "tmpfs", folder]
        if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
            raise OSError(done.stderr.strip())
        try:
            with open(Path(folder, "filler"), "wb") as file, contextlib.suppress(OSError):
                file.write(bytes(DISK_KIB << 11))
            auto = replace(case.request, lookahead=LookaheadConfig())
            with LookaheadRuntime.from_config(
                config_of(args, cache_dir=folder, lookahead=LookaheadConfig())
            ) as runtime:
                while True:
                    yield of_runtime(runtime, auto, args.when, lambda: None)
        finally:
            subprocess.run(["umount", folder], check=True)


def disconnect_rounds(fault: str, case: Case, args: argparse.Namespace) -> Iterator[Watched]:
    """Yield rounds whose last wait is the time to free the replicas of a client that disconnected."""
    with LookaheadRuntime.from_config(config_of(args)) as runtime, served(runtime) as (url, scheduler):
        while True:
            watched = Watched()
            stream = stream_of(f"{url}/v1", "demo", case.request, num_times=8)
            watched.read([] for _ in itertools.islice(stream, args.when + 1))
            stream.close()
            while scheduler.num_running:
                time.sleep(POLL_SECONDS)
            watched.times.append(time.perf_counter())
            watched.token_ids = scheduler.submit(case.request).result().token_ids
            yield watched


def sigterm_rounds(fault: str, case: Case, args: argparse.Namespace) -> Iterator[Watched]:
    """Yield rounds of an lp-serve that gets SIGTERM."""
    settings = ["port=0", "gpus=2", "device=cpu", "dtype=float32", "shutdown_timeout=60", "lookahead.prior=none"]
    settings += ["lookahead.W=7", "lookahead.N=5", "lookahead.G=7", "served_name=demo"]
    if args.model is not None:
        settings.append(f"model.path={args.model}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    while True:
        with subprocess.Popen([sys.executable, "-c", SERVE, *settings], env=environment, **options) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            pieces: list[str] = []
            refusals: list[str] = []

            def deltas(url: str = url, pieces: list[str] = pieces) -> Iterator[list[int]]:
                for text in stream_of(url, "demo", case.request):
                    pieces.append(text)
                    yield []

            def cause(process: subprocess.Popen = process, url: str = url, refusals: list[str] = refusals) -> None:
                process.send_signal(signal.SIGTERM)
                refusals.append(refusal_of(url.removesuffix("/v1")))

            watched = Watched()
            watched.read(deltas(), args.when, cause)
            process.wait()
        watched.token_ids = case.expected if "".join(pieces) == case.text else []
        watched.error = watched.error or (None if refusals == [REFUSAL] else f"it did not refuse: {refusals}")
        yield watched


def refusal_of(url: str) -> str:
    """Return the status of a server's /ready once it is no longer "ok"."""
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready").close()
        except urllib.error.HTTPError as error:
            return str(json.load(error)["status"])
        except OSError as error:  # the port is closed
            return str(error)
        time.sleep(POLL_SECONDS)


def stream_of(url: str, model: str, request: Request, num_times: int = 1) -> Generator[str, None, None]:
    """Yield the texts of a server's stream, of `num_times` as many tokens as the request has."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    length = num_times * request.max_new_tokens
    options: dict[str, Any] = {"temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.completions.create(
        model=model, prompt=list(request.prompt_ids), max_tokens=length, **options
    ) as stream:
        for chunk in stream:
            if chunk.choices:
                yield chunk.choices[0].text


class LinkedHost(SpawnHost):
    """Spawned replicas, each on one side of a link."""

    def __init__(self, config: RuntimeConfig, link: Link):
        self._link = link
        super().__init__(config)

    def start_process(self, index: int) -> None:
        with self._link.entered(index):
            super().start_process(index)


def network_rounds(fault: str, case: Case, args: argparse.Namespace) -> Iterator[Watched]:
    """Yield rounds in which the network between the two replicas has a fault; it is healed afterwards."""
    config = config_of(args, launcher=LauncherConfig(backend="gloo", interface=INTERFACE), gpus_per_replica=1)
    with Link() as link, link.entered(0):
        launcher = TeamLauncher(config, LinkedHost(config, link))
        try:
            while True:
                watched = Watched()
                timer = threading.Timer(args.blip_seconds, link.heal)

                def cause(timer: threading.Timer = timer) -> None:
                    link.delay_ms = args.delay_ms if fault == "delay" else 0.0
                    link.loss = args.loss if fault == "loss" else 0.0
                    link.is_cut = fault in ("partition", "blip")
                    if fault == "blip":
                        timer.start()

                events = launcher.run(case.request)
                watched.read((each.token_ids for each in events if isinstance(each, StepOutput)), args.when, cause)
                watched.losses = len(launcher.pool.losses)
                timer.cancel()
                link.heal()
                yield watched
                launcher.pool.losses.clear()
                while launcher.num_ready < 2:
                    time.sleep(POLL_SECONDS)
        finally:
            launcher.close()


def ray_rounds(fault: str, case: Case, args: argparse.Namespace) -> Iterator[Watched]:
    """Yield rounds in which one replica's Ray node is lost; then another node joins."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ |= RAY_SETTINGS
    small: dict[str, Any] = {
        "object_store_memory": 80_000_000,
        "include_dashboard": False,
        "dashboard_agent_listen_port": None,
    }
    cluster = Cluster(initialize_head=True, head_node_args=small | {"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        launcher = LauncherConfig(name="ray", placement="spread")
        with LookaheadRuntime.from_config(config_of(args, launcher=launcher)) as runtime:
            while True:
                lost = nodes.pop()
                yield of_runtime(runtime, case.request, args.when, partial(lost.kill_raylet, check_alive=False))
                cluster.remove_node(lost, allow_graceful=False)
                nodes.append(cluster.add_node(num_cpus=1, **small))
                while runtime.num_ready < 2:
                    time.sleep(POLL_SECONDS)
    finally:
        ray.shutdown()
        cluster.shutdown()


OTHERS = {"disk": disk_rounds, "disconnect": disconnect_rounds, "sigterm": sigterm_rounds, "ray_node": ray_rounds}
