#!/usr/bin/env bash
# Complete the setup, then run the tests.
#
#   scripts/test.sh                          all of them, with one process per core
#   scripts/test.sh -n 0 --pdb tests/test_runtime.py    in this process
#   scripts/test.sh tests/lookahead -x -k accept    pytest's arguments; paths are relative to the repository's root
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" ray,test
"$root/scripts/browser.sh"
cd "$root"
# A process more than there are cores would take longer to start than the waits that it fills.
num_workers="$(nproc --all)"
# Threads of two processes on two cores would wait for one another most of the time.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE  # otherwise a hundred processes would each compile the package
exec "$root/.venv/bin/python" -m pytest -n "$num_workers" --dist loadfile --no-loadscope-reorder "$@"  # slowest first
