"""Decode a file of prompts, several at once; an interrupted run continues where it stopped.

    python examples/batch_with_resume.py IN.jsonl OUT.jsonl      a line of IN.jsonl: {"prompt": "def f("}

`lp-generate prompts=IN.jsonl output=OUT.jsonl` does more: it refuses to continue with other settings.
"""

import json
import sys
from collections import deque
from pathlib import Path

from lp_runtime import LookaheadRuntime, Scheduler

MAX_AHEAD = 16  # requests in the scheduler's queue, so that no replica waits for the file


def done_before(output: Path) -> set[int]:
    """Return the numbers of the prompts that have a result; a last line that was cut off is removed."""
    if not output.exists():
        return set()
    text = output.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        output.write_text(whole)
    return {json.loads(line)["index"] for line in whole.splitlines()}


def main(prompts: Path, output: Path) -> None:
    """Append a line for each prompt that has none yet, in order."""
    done = done_before(output)
    with open(prompts, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    left = deque((index, line["prompt"]) for index, line in enumerate(lines) if index not in done)
    print(f"{len(left)} of {len(lines)} prompts to decode", file=sys.stderr)
    running = deque()
    with LookaheadRuntime() as runtime, Scheduler(runtime, policy="throughput") as scheduler, open(output, "a") as file:
        while left or running:
            while left and len(running) < MAX_AHEAD:
                index, prompt = left.popleft()
                running.append((index, scheduler.stream(prompt, max_new_tokens=32)))
            index, job = running.popleft()
            file.write(json.dumps({"index": index, "text": job.result().text}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
