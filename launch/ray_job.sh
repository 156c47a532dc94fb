#!/usr/bin/env bash
# Runs lp-generate as a job of a running Ray cluster: uploads this repository, runs the command there, shows its
# output, and ends with status 0, or 1 if the job failed.
#
#   ray start --head                                              a cluster of one machine, if there is none yet
#   launch/ray_job.sh prompt="def fib(n):" gpus=4                 the job
#   RAY_API_SERVER_ADDRESS=http://10.0.0.1:8265 launch/ray_job.sh prompt="def fib(n):" gpus=4   on another cluster
#
# The arguments are lp-generate's overrides; launcher=ray is added. The address is that of the cluster's dashboard
# (default http://127.0.0.1:8265), so the cluster's head needs ray[default]. The nodes need the dependencies of
# pyproject.toml in the Python that ray was started with; JOB_PYTHON=/path/on/the/nodes/python selects another.
#
# A cluster that requires a token gets the one that Ray's own clients use: RAY_AUTH_TOKEN, the file that
# RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token. RAY_AUTH_MODE=disabled sends none.
#
# The job runs in a copy of the repository on a node of the cluster, so model.path, prompts and output must be absolute
# paths that the nodes see. Files in .gitignore and .rayignore are not uploaded, nor are .git and .venv.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ray="$root/.venv/bin/ray"
[[ -x "$ray" ]] || ray=ray
cd "$root"
python="${PYTHON:-$root/.venv/bin/python}" # refuses bad settings before anything is uploaded; without it, the job does
[[ ! -x "$python" ]] || "$python" -m lp_runtime --cfg launcher=ray "$@" >/dev/null
address="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"
token="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
if [[ -z "${RAY_AUTH_MODE:-}" && (-n "${RAY_AUTH_TOKEN:-}" || -r "$token") ]]; then export RAY_AUTH_MODE=token; fi
if ! reply="$("$ray" job list --address "$address" 2>&1)"; then # Ray's reasons are tracebacks
    reason="$(grep -E '^[A-Za-z_.]+(Error|Exception)?: ' <<<"$reply" | tail -n 1)" || true # no match
    if [[ "$reason" == *uthenticat* ]]; then reason+="; set RAY_AUTH_TOKEN to the token of the cluster"; fi
    printf 'error: the Ray cluster at %s cannot be used: %s\n' "$address" "${reason:-${reply##*$'\n'}}" >&2
    exit 1
fi
exec "$ray" job submit --address "$address" --working-dir . -- "${JOB_PYTHON:-python}" -m lp_runtime launcher=ray "$@"
