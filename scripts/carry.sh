#!/usr/bin/env bash
# Pack all other needed packages into one archive, for a machine with torch and transformers but no package registry.
#
#   scripts/carry.sh OUT.tar.xz               here, with a registry: Hydra and its dependencies, about 0.3 MiB
#   scripts/carry.sh OUT.tar.xz gguf numba    also these packages, in the versions of .venv if it has them
#   SITE=OUT.tar.xz scripts/gpu.sh OUT A      there, in a copy of this repository
#
# For Linux, x86-64, and Python VERSION, 3.12 by default. A benchmark's prompts must be copied separately.
set -euo pipefail
out="$(realpath -m "$1")"
shift
version="${VERSION:-3.12}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || "$root/scripts/setup.sh"
read -ra wanted < <("$python" - hydra-core omegaconf "$@" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version


def pinned(name: str) -> str:
    """Return NAME==VERSION of an installed package, else the name alone."""
    try:
        return f"{name}=={version(name)}"
    except PackageNotFoundError:
        return name


print(*map(pinned, sys.argv[1:]))
END
)
parser="antlr4-python3-runtime==4.9.*" # needed by hydra; registries have no wheel of it
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
tar -C "$folder/site" -c . | xz -"${XZ_LEVEL:-9}" -T0 >"$out"
echo "$out: $(du -k "$out" | cut -f1) KiB, for Python $version"
