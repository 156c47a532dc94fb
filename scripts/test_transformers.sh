#!/usr/bin/env bash
# Run tests of loading, slicing and decoding models with other versions of transformers.
#
#   scripts/test_transformers.sh           the oldest that pyproject.toml allows, and the newest tried one
#   scripts/test_transformers.sh oldest    the oldest
#   scripts/test_transformers.sh 5.20.0    this one; all other packages are those of .venv
#   scripts/test_transformers.sh oldest tests/model/test_runner.py ...    these tests
#
# Does not test other versions of torch: their wheels may need gigabytes. CONTRIBUTING.md explains how to do that.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" ray,test
cd "$root"
oldest="$(sed -n 's/^ *"transformers>=\([0-9]*\.[0-9]*\),.*/\1.0/p' pyproject.toml)"
newest=5.24.0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

versions=("$oldest" "$newest")
if [[ $# -gt 0 ]]; then
    versions=("${1/#oldest/$oldest}")
    shift
fi
for version in "${versions[@]}"; do
    folder="$root/.venv/transformers-$version" # an environment that takes all other packages from .venv
    python="$folder/bin/python"
    if [[ ! -f "$folder/done" ]]; then
        "$root/.venv/bin/python" -m venv --clear --without-pip "$folder" # pip is one of .venv's packages
        echo "import site; site.addsitedir('$(packages "$root/.venv")')" >"$(packages "$folder")/venv.pth"
        "$python" -m pip --disable-pip-version-check install -qq --no-compile "transformers==$version"
        touch "$folder/done"
    fi
    "$python" -c 'import sys, transformers as found; assert found.__version__ == sys.argv[1], found' "$version"
    echo "with transformers $version"
    tests=(tests/model/test_chain_runner.py tests/model/loading/test_loader.py tests/model/hf/test_types.py tests/dropin/test_lookahead_generate_cache.py)
    if [[ "$version" != "$newest" ]]; then # the newest differs little from .venv's
        tests+=(tests/model/test_runner.py tests/model/checks/test_self_check.py tests/model/modules/test_fusing.py)
        tests+=(tests/model/tensor_parallel/test_slicing.py tests/sampling/test_processors.py tests/dropin/test_lookahead_generate.py)
    fi
    [[ $# -eq 0 ]] || tests=("$@")
    "$python" -m pytest -n "$(nproc --all)" --dist loadfile --no-loadscope-reorder "${tests[@]}"
done
