#!/usr/bin/env bash
# Make .venv and install Oarlock with the cpu backend and the page for browsers into it; with "test", also the simulated devices and what tests need.
# Idempotent: a stamp holds a hash of everything that decides what is installed, and an equal stamp ends the script at once.
#
#   tools/install.sh run|test        PYTHON=python3.12  VENV=.venv  TORCH=torch==2.13.0
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-test}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
case $what in run | test) ;; *) echo "usage: tools/install.sh run|test" >&2; exit 2 ;; esac

fail() { echo "install: $*" >&2; exit 1; }

# The cpu backend compiles its sources, so they count too.
mapfile -t sources < <(find backends/cpu/setup.py backends/cpu/csrc -type f 2>/dev/null | sort)
run_inputs=(pyproject.toml backends/cpu/pyproject.toml plugins/ui/pyproject.toml tools/install.sh "${sources[@]}")
compiler=$(command -v "${CXX:-c++}" || command -v g++ || echo none)
version=$("$compiler" --version 2>/dev/null | head -n 1) || true  # a newer one may compile what the older could not
key_of() { { echo "$torch $compiler $version ${OARLOCK_CPU_KERNELS:-}"; sha256sum "$@"; } | sha256sum | cut -d' ' -f1; }
run_key=$(key_of "${run_inputs[@]}")
test_key=$(key_of "${run_inputs[@]}" {plugins/*,backends/cuda,backends/xpu,backends/neuron,backends/tpu}/pyproject.toml)
is_stamped() { [ -f "$venv/.installed-$1" ] && [ "$(cat "$venv/.installed-$1")" = "$2" ]; }
if [ "$what" = run ]; then is_stamped run "$run_key" && exit 0; else is_stamped test "$test_key" && exit 0; fi

if [ ! -x "$venv/bin/python" ]; then
  command -v "$python" >/dev/null || fail "$python is not here; install Python 3.11 or newer, or name one: make install PYTHON=/path/to/python3"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$("$python" --version) is too old; Oarlock needs Python 3.11 or newer: make install PYTHON=python3.12"
  echo "making $venv"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    fail "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
  fi
fi
pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)

# torch first and pinned: a looser requirement may bring a build of several gigabytes for hardware that is not here.
# setuptools and ninja are here because the packages below build against this torch, without build isolation.
if ! "$venv/bin/python" - "$torch" <<'EOF'; then
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    want = sys.argv[1].partition("==")[2]
    sys.exit(not version("torch").startswith(want) or not all(map(version, ("setuptools", "wheel", "ninja"))))
except PackageNotFoundError:
    sys.exit(1)
EOF
  echo "installing $torch"
  "${pip[@]}" "$torch" "setuptools>=77" wheel ninja numpy
fi

packages=(-e . -e backends/cpu -e plugins/ui)
if [ "$what" = test ]; then
  packages=(-e ".[test]" -e backends/cpu)
  for plugin in plugins/*/ backends/cuda/ backends/xpu/ backends/neuron/; do
    [ -f "${plugin}pyproject.toml" ] && packages+=(-e "${plugin%/}")
  done
fi
if [ "$compiler" = none ] || [ "${OARLOCK_CPU_KERNELS:-}" = 0 ]; then echo "installing oarlock"; else echo "installing oarlock, compiling its CPU kernels unless that was done before: up to a minute"; fi
"${pip[@]}" --no-build-isolation "${packages[@]}"
# What the tpu backend needs has an environment of its own (make test-tpu); here is its light half.
if [ "$what" = test ]; then "${pip[@]}" --no-build-isolation --no-deps -e backends/tpu; fi
# The kernels of plugins/triton_kernels run in Triton's interpreter here, and are compiled for chips that are not. The CPU build of torch
# brings no Triton. Without its dependencies: it must change nothing of what is installed.
if [ "$what" = test ]; then "${pip[@]}" --no-deps triton==3.7.1; fi
# What serves is asked of the package itself: pip hides what a build says.
problem=$("$venv/bin/python" -c 'from oarlock_cpu import native; print(native.problem())')
if [ -n "$problem" ]; then
  echo "reference ops are active: the cpu device computes with plain torch, several times slower"
  echo "  why: $problem"
  if [ "${OARLOCK_CPU_KERNELS:-}" = 0 ]; then echo "  to mend it: run make install without OARLOCK_CPU_KERNELS=0"
  else echo "  to mend it: install a C++20 compiler (apt-get install g++), or name one (CXX=clang++), and run make install again"; fi
fi
# What tests need includes all that serving needs.
echo "$run_key" >"$venv/.installed-run"
if [ "$what" = test ]; then echo "$test_key" >"$venv/.installed-test"; fi
