#!/usr/bin/env bash
# Make .venv-tpu and install Oarlock with the tpu backend into it, at the versions that docs/tpu.md was written with. No TPU is needed.
# Idempotent: a stamp holds a hash of what decides what is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-tpu
key=$(sha256sum pyproject.toml backends/tpu/pyproject.toml backends/tpu/requirements.txt tools/install_tpu.sh | sha256sum | cut -d' ' -f1)
[ -f "$venv/.installed" ] && [ "$(cat "$venv/.installed")" = "$key" ] && exit 0

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
started=$SECONDS
"${pip[@]}" -r backends/tpu/requirements.txt
"${pip[@]}" --no-build-isolation -e ".[conformance]" pytest-timeout -e backends/tpu
echo "made $venv in $((SECONDS - started)) s"
echo "$key" >"$venv/.installed"
