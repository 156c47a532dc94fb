"""Decode on a Ray cluster, with replicas spread over its nodes so that a lost machine loses few of them.

ray start --head && python examples/ray_job.py 2                           on a node of the cluster
ray job submit --working-dir . -- python examples/ray_job.py 8             from elsewhere, in the repository's root
"""

import sys

from lp_runtime import LauncherConfig, LookaheadRuntime


def main(gpus: int, address: str | None = None) -> None:
    """Print an answer. Without an address, use the cluster of this machine or job, else start one."""
    launcher = LauncherConfig(name="ray", placement="spread", address=address)
    with LookaheadRuntime(gpus=gpus, launcher=launcher) as runtime:
        generation = runtime.generate("def fibonacci(n):\n", max_new_tokens=64)
        print(generation.text)
        print(f"{generation.num_tokens} tokens in {generation.steps} steps on {runtime.num_replicas} replicas")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
