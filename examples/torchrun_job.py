"""Decode one prompt with all ranks of torchrun: each rank is a replica, and all share every step.

torchrun --standalone --nproc-per-node 2 examples/torchrun_job.py
torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 8 examples/torchrun_job.py

The second command is for two machines; use --node-rank 1 on the other one.
"""

from lp_runtime import LookaheadRuntime


def main() -> None:
    """Print the text on rank 0; the other ranks serve its requests until it leaves the block."""
    with LookaheadRuntime() as runtime:
        if runtime.is_leader:
            generation = runtime.generate("def fibonacci(n):\n", max_new_tokens=64)
            print(generation.text)
            print(f"{generation.num_tokens} tokens in {generation.steps} steps on {runtime.num_replicas} replicas")


if __name__ == "__main__":
    main()
