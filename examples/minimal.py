"""Generate text with lookahead parallelism: the Python API in a few lines.

    python examples/minimal.py      one replica
    python examples/minimal.py 2    two replicas share every step: two GPUs, or two processes on a CPU

The demo model comes with the package. Any other model: LookaheadRuntime(model="DIRECTORY OR HUB ID").
"""

import sys

from lp_runtime import LookaheadRuntime

PROMPT = "def fibonacci(n):\n"


def main(num_replicas: int) -> None:
    """Print an answer as it arrives, then the number of tokens and steps."""
    with LookaheadRuntime(gpus=num_replicas) as runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=64)
        for delta in stream:
            print(delta.text, end="", flush=True)
        generation = stream.generation
        print(f"\n{generation.num_tokens} tokens in {generation.steps} steps", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
