"""Many clients of lp-serve at once, through the openai client: is every answer right, and how soon is it there?

    python benchmarks/load.py --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --gpus 2 --clients 64 1

For each number of clients and each policy (latency: LP at its maximum; throughput: LP 1; fair: elastic) a server of
spawned replicas is asked by clients that each send one request after another, streamed and whole, greedy and sampled,
in turns. Every answer is compared with that of the same prompt alone on one replica. Prints tokens/s, percentiles of
the latency and of the time to the first token, errors, the memory of driver and replicas at the start and at the
end of each quarter, and how soon after a client of a stream has gone nothing runs any more. The exit status is 1 if an
answer is wrong or a request fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path

import openai
from common import add_arguments, load_prompts, machine, markdown
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig

FIXED = LookaheadConfig(7, 5, 7, prior="none")
SAMPLED = {"temperature": 0.8, "seed": 7}
GREEDY = {"temperature": 0.0}
GONE = 11  # streams whose clients go


def resident(runtime: LookaheadRuntime) -> int:
    """Bytes of this process and of its replicas."""
    pids = ["self", *(process.pid for process in runtime.launcher._processes.values())]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return 4096 * sum(pages)


class Client(threading.Thread):
    """Asks one thing after another until its time is up."""

    def __init__(self, number: int, url: str, cases: list[tuple[str, bool]], expected: dict, length: int, until: float):
        super().__init__(daemon=True)
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
        self._number, self._cases, self._expected, self._length, self._until = number, cases, expected, length, until
        self.latencies: list[float] = []
        self.firsts: list[float] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        number = self._number
        while time.perf_counter() < self._until:
            prompt, is_sampled = self._cases[number % len(self._cases)]
            number += 17
            started = time.perf_counter()
            try:
                text = self._ask(prompt, SAMPLED if is_sampled else GREEDY, number % 2 == 0, started)
                if text != self._expected[prompt, is_sampled]:
                    self.wrong.append("another text")
            except openai.OpenAIError as error:
                self.wrong.append(str(error))
            self.latencies.append(time.perf_counter() - started)

    def _ask(self, prompt: str, options: dict, is_streamed: bool, started: float) -> str:
        more = {"max_tokens": self._length, "extra_body": {"ignore_eos": True}, **options}
        if not is_streamed:
            return self._client.completions.create(model="demo", prompt=prompt, **more).choices[0].text
        text = ""
        for chunk in self._client.completions.create(model="demo", prompt=prompt, stream=True, **more):
            if not text:
                self.firsts.append(time.perf_counter() - started)
            text += chunk.choices[0].text
        return text


def freed(url: str, prompt: str) -> float:
    """Seconds from when a client of a stream goes until /metrics says that nothing runs."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    options = {"max_tokens": 900, "extra_body": {"ignore_eos": True, "lookahead": {"W": 0, "N": 2, "G": 0}}}
    stream = client.completions.create(model="demo", prompt=prompt, stream=True, **options)
    next(iter(stream))
    started = time.perf_counter()
    stream.close()
    while "lp_requests_running 0.0" not in urllib.request.urlopen(f"{url}/metrics").read().decode():
        time.sleep(0.002)
    return time.perf_counter() - started


def percentiles(values: list[float]) -> str:
    """Median, 90th and 99th, in seconds."""
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100)
    return f"{cuts[49]:.2f} / {cuts[89]:.2f} / {cuts[98]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(limit=8, max_new_tokens=48)
    parser.add_argument("--gpus", nargs="+", type=int, default=[2])
    parser.add_argument("--clients", nargs="+", type=int, default=[64, 1])
    parser.add_argument("--policies", nargs="+", default=["latency", "throughput", "fair"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--auto", action="store_true", help="steps as large as pay, not 56 guesses a request")
    args = parser.parse_args()
    prompts = [prompt.value for prompt in load_prompts(args)]
    cases = [(prompt, is_sampled) for prompt in prompts for is_sampled in (False, True)]
    config = RuntimeConfig(model=ModelConfig(path=args.model), gpus=1, device="cpu", dtype="float32", lookahead=FIXED)
    if args.auto:
        config.lookahead = LookaheadConfig()
    expected = {}
    with LookaheadRuntime.from_config(config) as runtime:
        for prompt, is_sampled in cases:
            sampling = SamplingConfig(**(SAMPLED if is_sampled else GREEDY))
            done = runtime.generate(prompt, args.max_new_tokens, eos=False, sampling=sampling)
            expected[prompt, is_sampled] = done.text
    rows, num_wrong = [], 0
    for gpus in args.gpus:
        config.gpus = gpus
        for num_clients in args.clients:
            for policy in args.policies:
                with LookaheadRuntime.from_config(config) as runtime, served(runtime, 10_000, policy) as (url, _):
                    started = time.perf_counter()
                    until = started + args.seconds
                    clients = [
                        Client(number, f"{url}/v1", cases, expected, args.max_new_tokens, until)
                        for number in range(num_clients)
                    ]
                    for client in clients:
                        client.start()
                    sizes = []
                    for _ in range(4):  # the last quarter ends with the last answer
                        sizes.append(resident(runtime) / 2**20)
                        time.sleep(args.seconds / 4)
                    for client in clients:
                        client.join()
                    seconds = time.perf_counter() - started
                    sizes.append(resident(runtime) / 2**20)
                    waits = sorted(freed(url, prompts[0]) for _ in range(GONE))
                latencies = [each for client in clients for each in client.latencies]
                wrong = [each for client in clients for each in client.wrong]
                num_wrong += len(wrong)
                for message in sorted(set(wrong)):
                    print(message, file=sys.stderr)
                speed = f"{len(latencies) * args.max_new_tokens / seconds:.1f}"
                firsts = percentiles([each for client in clients for each in client.firsts])
                rows.append(
                    [gpus, num_clients, policy, len(latencies), len(wrong), speed, percentiles(latencies), firsts]
                )
                rows[-1] += [" ".join(f"{size:.0f}" for size in sizes), f"{waits[GONE // 2]:.3f} / {waits[-1]:.3f}"]
                print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}; {args.max_new_tokens} tokens a request, {args.seconds:g} s each\n")
    header = ["replicas", "clients", "policy", "requests", "wrong or failed", "tokens/s", "latency s, 50/90/99%"]
    print(markdown([*header, "first token s, 50/90/99%", "MiB at each quarter", "freed s, 50/100%"], rows))
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
