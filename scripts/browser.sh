#!/usr/bin/env bash
# Provide a headless Chromium for tests/server/test_page.py, which is skipped without one: use the machine's, or fetch
# @sparticuz/chromium of the npm registry (70 MB) and unpack it into .venv/chromium.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$root/.venv/chromium"
version=153.0.0

say() { printf '%s\n' "$*" >&2; }

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [[ -x "$folder/chromium" ]]; then exit 0; fi
if ! command -v npm >/dev/null || [[ "$(uname -sm)" != "Linux x86_64" ]]; then
    say "no Chromium here, and no npm to fetch one: the page is not tested"
    exit 0
fi

say "fetching a headless Chromium into $folder"
parts="$(mktemp -d "$root/.venv/chromium.XXXXXX")"
trap 'rm -rf "$parts"' EXIT
fetch() {
    cd "$parts"
    timeout 300 npm pack --silent --fetch-retries=0 "@sparticuz/chromium@$version" >/dev/null
    tar -xzf sparticuz-chromium-*.tgz
    for name in chromium al2023.tar fonts.tar swiftshader.tar; do
        node -e 'const [from, to] = process.argv.slice(1), fs = require("fs")
            fs.writeFileSync(to, require("zlib").brotliDecompressSync(fs.readFileSync(from)))' "package/bin/$name.br" "$name"
    done
    for name in *.tar; do tar -xf "$name"; done
    sed -i "s#/opt/fonts#$folder/fonts#; s#/tmp/fonts-cache/#$folder/fonts-cache#" fonts.conf
    rm -rf package ./*.tar ./*.tgz
    chmod +x chromium
}
if (set -e; fetch) && mv "$parts" "$folder"; then exit 0; fi
say "it could not be fetched: the page is not tested"
