#!/usr/bin/env bash
# Runs lp-generate under torchrun: one process per replica, on this machine or on several.
#
# One machine, 4 replicas (without NPROC: one per GPU, or 2 on a machine without GPUs):
#
#   NPROC=4 launch/torchrun.sh prompt="def fib(n):" max_new_tokens=128
#
# Several machines: the same command on each, with the number of machines, the rank of this machine (machine 0 prints
# and writes; MASTER_ADDR is its address for the others) and a free port of machine 0:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29511 NPROC=4 launch/torchrun.sh prompt="def fib(n):"
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29511 NPROC=4 launch/torchrun.sh prompt="def fib(n):"
#
# MAX_RESTARTS=3 restarts all ranks when one fails, at most 3 times; a file of prompts then continues where it stopped.
# With NNODES=1:4 the remaining ones of 4 machines are restarted. Run the same command on each, without NODE_RANK;
# they meet at MASTER_ADDR, whose loss ends all. The output must be on a file system that all machines see:
#
#   NNODES=1:4 MASTER_ADDR=10.0.0.1 MAX_RESTARTS=3 launch/torchrun.sh prompts=/shared/in.jsonl output=/shared/out.jsonl
#
# All machines need the model at the same model.path. The arguments are lp-generate's overrides; gpus= defaults to
# NNODES x NPROC. The Python is that of .venv (scripts/setup.sh makes it), else the one on the PATH; PYTHON=...
# selects another. Needs no Ray.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python="$root/.venv/bin/python"
    [[ -x "$python" ]] || python=python3
fi

is_number() { [[ "$1" =~ ^[0-9]{1,6}$ ]] && ((10#$1 >= 10#$2 && 10#$1 <= 10#$3)); }
refuse() {
    echo "error: $1=${!1}: must be a number from $2" >&2
    exit 2
}
need() { [[ -n "${!1:-}" ]] || { echo "error: $1: must be given: $2" >&2 && exit 2; }; }
check() { [[ -z "${!1:-}" ]] || is_number "${!1}" "$2" "$3" || refuse "$1" "$2 to $3"; }
check MASTER_PORT 1 65535
check MAX_RESTARTS 0 999999
[[ "${NPROC:-}" =~ ^(auto|cpu|gpu)$ ]] || check NPROC 1 999999
nnodes="${NNODES:-1}"
max_nodes="${nnodes#*:}"
{ is_number "$max_nodes" 1 999999 && is_number "${nnodes%%:*}" 1 "$max_nodes"; } || refuse NNODES "1 to 999999, or two as MIN:MAX"
check NODE_RANK 0 $((10#$max_nodes - 1))

# With --cfg first, only show the settings. Bad ones end here in one line: torchrun would add a page, and try again.
if [[ "${1:-}" == --cfg ]]; then exec "$python" -m lp_runtime "$@"; fi
"$python" -m lp_runtime --cfg "$@" >/dev/null

count_gpus='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 2)'
nproc="${NPROC:-$("$python" -c "$count_gpus")}"
if [[ "$nnodes" == 1 ]]; then
    where=(--standalone)
elif [[ "$nnodes" == *:* ]]; then
    need MASTER_ADDR "the address of the machine where all meet"
    where=(--nnodes "$nnodes" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29511}" --rdzv-id "${JOB_ID:-lp_runtime}")
else
    need NODE_RANK "which of the NNODES machines this is, 0 to NNODES - 1"
    need MASTER_ADDR "the address of machine 0"
    where=(--nnodes "$nnodes" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29511}")
fi

# lp_runtime sets its own thread count on CPUs; this keeps torchrun from warning that it set one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m torch.distributed.run "${where[@]}" --nproc-per-node "$nproc" --max-restarts "${MAX_RESTARTS:-0}" -m lp_runtime "$@"
