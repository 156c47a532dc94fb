#!/usr/bin/env bash
# Set up what is missing, then run the tests.
#
#   scripts/test.sh                          all of them, one process a core and one more
#   scripts/test.sh -n 0 --pdb tests/test_runtime.py    in this process
#   scripts/test.sh tests/lookahead -x -k accept    pytest's arguments; paths are relative to the repository's root
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" ray,test
"$root/scripts/browser.sh"
cd "$root"
# Tests of several processes wait for one another: a process more than there are cores keeps the cores busy.
num_workers="$(($(nproc --all) + 1))"
# Threads of two processes on two cores would wait for one another most of the time.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE  # a hundred processes would compile the package anew
exec "$root/.venv/bin/python" -m pytest -n "$num_workers" --dist loadfile --no-loadscope-reorder "$@"  # slowest first
