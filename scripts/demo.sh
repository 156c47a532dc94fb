#!/usr/bin/env bash
# The main job: set up what is missing, then let the demo model write code on 2 replicas that share every step, and
# once more one token a step, for comparison.
#
#   scripts/demo.sh                                        as above
#   scripts/demo.sh gpus=4 lookahead.W=7 max_new_tokens=64  with other settings: lp-generate's overrides
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# An override of launcher= may need Ray; everything else does without it.
extras=""
for argument in "$@"; do
    [[ "$argument" == launcher=ray ]] && extras="ray"
done
"$root/scripts/setup.sh" "$extras"

# Two replicas need two GPUs, or none: with one GPU they run on the CPU.
device="$("$root/.venv/bin/python" -W ignore -c '
import sys, torch
from lp_runtime.distributed.devices import why_no_gpu
if reason := why_no_gpu():
    print(f"warning: the demo runs on the CPU: {reason}", file=sys.stderr)
print("cuda" if torch.cuda.is_available() and torch.cuda.device_count() > 1 else "cpu")')"

prompt='def read_json(path: str) -> dict:
    """Read a JSON file and return its contents."""
    with open'
# Of settings given twice, the last one counts. A prompts= of the user's takes the place of ours.
for argument in "$@"; do
    if [[ "$argument" == prompts=* ]]; then
        exec "$root/.venv/bin/lp-generate" gpus=2 device="$device" "$@"
    fi
done
exec "$root/.venv/bin/lp-generate" prompt="$prompt" gpus=2 device="$device" compare=true eos=false max_new_tokens=192 "$@"
