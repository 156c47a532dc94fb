#!/usr/bin/env bash
# Run the demo: complete the setup, then let the demo model write code on 2 replicas that share every step, and once
# more with one token per step, for comparison.
#
#   scripts/demo.sh                                        the demo
#   scripts/demo.sh gpus=4 lookahead.W=7 max_new_tokens=64  the demo with overrides of lp-generate
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Only the override launcher=ray needs Ray.
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
# If a setting is given twice, the last one counts. The user's prompts= replaces our prompt.
for argument in "$@"; do
    if [[ "$argument" == prompts=* ]]; then
        exec "$root/.venv/bin/lp-generate" gpus=2 device="$device" "$@"
    fi
done
exec "$root/.venv/bin/lp-generate" prompt="$prompt" gpus=2 device="$device" compare=true eos=false max_new_tokens=192 "$@"
