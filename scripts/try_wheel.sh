#!/usr/bin/env bash
# Try an installed lp_runtime from an empty folder: dependencies, demo, server, an example, import time.
#
#   scripts/try_wheel.sh BIN      the folder of the environment's commands; minimal.py of examples/ is next to this script
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bin="$(cd "$1" && pwd)"
port="${PORT:-8000}"
example="$here/minimal.py"
[[ -f "$example" ]] || example="$here/../examples/minimal.py"
cd "$(mktemp -d)"
unset PYTHONPATH

"$bin/pip" check
"$bin/lp-generate" prompt="def fib(n):" max_new_tokens=24 gpus=2 device=cpu compare=true
"$bin/python" "$example"
"$bin/lp-serve" port="$port" device=cpu &
server=$!
trap 'kill "$server"; wait "$server" || true' EXIT
for ((second = 0; second < 300; second++)); do
    curl -sf "http://127.0.0.1:$port/ready" >/dev/null && break
    sleep 1
done
curl -sf "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "Is it? ", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}'
echo
"$bin/python" -X importtime -c "import lp_runtime" 2>&1 | tail -n 1 # microseconds
