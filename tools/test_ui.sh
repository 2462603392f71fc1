#!/usr/bin/env bash
# Run the tests of the page in a headless Chromium, from an environment of their own. Oarlock serves from .venv.
#
#   tools/test_ui.sh        VENV=.venv  MODEL=chat model  CHROMIUM=/path/to/chromium
set -euo pipefail
cd "$(dirname "$0")/.."

chromium=${CHROMIUM:-}
for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do
  [ -n "$chromium" ] || chromium=$(command -v "$name" || true)
done
if [ -z "$chromium" ]; then
  echo "test-ui: no Chromium is here, so the page was not tested in a browser" >&2
  echo "  to mend it: install one (Debian: apt-get install chromium-headless-shell), or name it: make test-ui CHROMIUM=/path/to/chromium" >&2
  exit 1
fi

venv=.venv-ui
key=$(sha256sum plugins/ui/browser/requirements.txt tools/test_ui.sh | sha256sum | cut -d' ' -f1)
if [ ! -f "$venv/.installed" ] || [ "$(cat "$venv/.installed")" != "$key" ]; then
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -r plugins/ui/browser/requirements.txt
  echo "$key" >"$venv/.installed"
fi

bin=${VENV:-.venv}/bin
model=${MODEL:-}
[ -n "$model" ] || model=$("$bin/python" tools/make_models.py --gguf-only smollm2)
PYTHONPATH=tests/clients OARLOCK="$bin/oarlock" MODEL="$model" CHROMIUM="$chromium" \
  exec "$venv/bin/python" -m pytest -c /dev/null --rootdir plugins/ui/browser -p no:cacheprovider plugins/ui/browser "$@"
