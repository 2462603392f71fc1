#!/usr/bin/env bash
# Run other people's clients against a server, each from an environment that holds nothing but the client. Oarlock serves from .venv.
# A run without a failure writes docs/clients/NAME.md.
#
#   tools/test_clients.sh [NAME...]     all folders of tests/clients     VENV=.venv  MODEL=chat model
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$PWD/${VENV:-.venv}/bin
names=("$@")
[ ${#names[@]} -gt 0 ] || for folder in tests/clients/*/; do [ -f "${folder}requirements.txt" ] && names+=("$(basename "$folder")"); done
MODEL=${MODEL:-}
[ -n "$MODEL" ] || MODEL=$("$bin/python" tools/make_models.py --gguf-only smollm2)
export MODEL OARLOCK=$bin/oarlock PYTHONPATH=$PWD/tests/clients
COMMIT=$(git rev-parse --short=12 HEAD 2>/dev/null || echo "outside a repository")
git diff --quiet HEAD -- core plugins backends/cpu 2>/dev/null || COMMIT+="+changes"
export COMMIT

status=0
for name in "${names[@]}"; do
  folder=tests/clients/$name
  [ -f "$folder/requirements.txt" ] || { echo "test-clients: there is no client $name; $(ls -d tests/clients/*/ | xargs -n1 basename | tr '\n' ' ')" >&2; exit 2; }
  venv=.venv-clients/$name
  key=$(sha256sum "$folder/requirements.txt" tools/test_clients.sh | sha256sum | cut -d' ' -f1)
  if [ ! -f "$venv/.installed" ] || [ "$(cat "$venv/.installed")" != "$key" ]; then
    echo "making $venv"
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$folder/requirements.txt"
    echo "$key" >"$venv/.installed"
  fi
  client=$(head -n 1 "$folder/requirements.txt" | grep -o '^[a-z_-]*')
  "$venv/bin/python" -m pytest -c /dev/null --rootdir "$folder" --confcutdir tests/clients -p no:cacheprovider -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=session -o asyncio_default_test_loop_scope=session -q -rfEx \
    --client "$client" --report "docs/clients/$name.md" "$folder" || status=$?
done
exit "$status"
