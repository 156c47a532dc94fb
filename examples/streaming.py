"""Stream the answers of several prompts at once in asyncio, and cancel one of them.

python examples/streaming.py
"""

import asyncio

from lp_runtime import LookaheadRuntime, Scheduler
from lp_runtime.scheduler.job import Job

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import os\n"]


async def show(job: Job, max_deltas: int | None = None) -> str:
    """Return a job's text; cancel the job after `max_deltas` deltas."""
    text = ""
    num_deltas = 0
    async for delta in job.deltas():
        text, num_deltas = text + delta.text, num_deltas + 1
        if num_deltas == max_deltas:
            job.cancel()
            return f"{text} ... (cancelled)"
    return text


async def answer(scheduler: Scheduler) -> list[str]:
    """Decode all prompts at once; the last one is cancelled after two deltas."""
    jobs = [scheduler.stream(prompt, max_new_tokens=48) for prompt in PROMPTS]
    return await asyncio.gather(show(jobs[0]), show(jobs[1]), show(jobs[2], max_deltas=2))


def main() -> None:
    """Print every prompt with its answer."""
    with LookaheadRuntime() as runtime, Scheduler(runtime) as scheduler:
        for prompt, text in zip(PROMPTS, asyncio.run(answer(scheduler)), strict=True):
            print(f"{prompt}{text}\n")


if __name__ == "__main__":
    main()
