#!/usr/bin/env bash
# Run tests with the oldest transformers that pyproject.toml allows, beside .venv's versions of everything else.
#
#   scripts/oldest.sh                    those that tell whether models are loaded, sliced and decoded as ever
#   scripts/oldest.sh tests/model -x     pytest's arguments
#
# Not with the oldest torch: its only wheel in the registry brings 4.6 GB of CUDA libraries. CONTRIBUTING.md says how.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" ray,test
cd "$root"
version="$(sed -n 's/^ *"transformers>=\([0-9]*\.[0-9]*\),.*/\1.0/p' pyproject.toml)"
folder="$root/.venv/transformers-$version" # an environment that looks for all else in .venv
python="$folder/bin/python"
if [[ ! -f "$folder/done" ]]; then
    "$root/.venv/bin/python" -m venv --clear "$folder"
    packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    echo "import site; site.addsitedir('$(packages "$root/.venv")')" >"$(packages "$folder")/venv.pth"
    "$python" -m pip --disable-pip-version-check install -qq "transformers==$version"
    touch "$folder/done"
fi
"$python" -c 'import sys, transformers as found; assert found.__version__ == sys.argv[1], found; print("transformers", sys.argv[1])' "$version"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [[ $# -eq 0 ]]; then
    set -- tests/engine/test_sequence.py tests/engine/test_batching.py tests/engine/test_exact_sampling.py tests/model/kv_cache \
        tests/model/test_loader.py tests/model/test_runner.py tests/model/test_self_check.py tests/model/test_types.py \
        tests/model/test_chain_runner.py tests/model/optimize tests/model/tensor_parallel/test_slicing.py \
        tests/sampling tests/test_hf_generate.py tests/test_runtime.py tests/launchers/test_spawn.py
fi
exec "$python" -m pytest -q -n "$(($(nproc --all) + 1))" --dist loadfile --no-loadscope-reorder "$@"
