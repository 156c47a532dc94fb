#!/usr/bin/env bash
# For a machine that has torch and transformers and reaches no package registry: what else is needed, as one archive.
#
#   scripts/carry.sh OUT.tar.xz [3.12]       here, where a registry is reached; for Linux, x86-64, and a version of Python
#   mkdir site && tar xf OUT.tar.xz -C site && export PYTHONPATH=$PWD/site        there, in a copy of this repository
#
# The versions are those of .venv; pytest is there for tests/gpu. A benchmark's prompts must be brought along, too.
set -euo pipefail
out="$(realpath -m "$1")"
version="${2:-3.12}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" ray,test
python="$root/.venv/bin/python"
read -ra wanted < <("$python" - hydra-core omegaconf numba llvmlite psutil tqdm pyyaml pytest pluggy iniconfig pygments packaging <<'END'
import sys
from importlib.metadata import version

print(*(f"{name}=={version(name)}" for name in sys.argv[1:]))
END
)
parser="antlr4-python3-runtime==4.9.*" # hydra's; registries have no wheel of it
pip=("$python" -m pip --disable-pip-version-check -q)
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${pip[@]}" wheel --no-deps --wheel-dir "$folder/wheels" "$parser"
platforms=()
for glibc in 12 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"${pip[@]}" install --no-deps --only-binary=:all: --implementation cp --python-version "$version" "${platforms[@]}" \
    --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --target "$folder/site" \
    --find-links "$folder/wheels" "$parser" "${wanted[@]}"
find "$folder/site" -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
mkdir -p "$(dirname "$out")"
tar -C "$folder/site" -c . | xz -${XZ_LEVEL:-9} -T0 >"$out"
echo "$out: $(du -m "$out" | cut -f1) MiB, for Python $version"
