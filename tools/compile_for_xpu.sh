#!/usr/bin/env bash
# Compile the kernels of plugins/triton_kernels to SPIR-V for an Intel GPU that is described, with the newest Triton for XPU that a package
# index has by itself. An environment of its own, .venv-xpu (1.5 GB), for that Triton lies where the other one does; torch is .venv's.
# Needs a C++ compiler, and of Debian or Ubuntu the packages libze-dev and libze1, which are unpacked beside it and not installed.
#
#   tools/compile_for_xpu.sh [--only NAME] ...      the options of plugins/triton_kernels/tests/kernel_compile.py
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-xpu torch=${VENV:-.venv}
with_torch=$("$torch/bin/python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null) || { echo "compile_for_xpu: no torch in $torch; run make install first" >&2; exit 1; }
if [ ! -f "$venv/.installed" ]; then
  "$torch/bin/python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps triton-xpu==3.3.0b1 intel-sycl-rt==2025.1.1
  (cd "$venv" && apt-get -q download libze-dev libze1 && for package in libze*.deb; do dpkg -x "$package" ze; done)
  touch "$venv/.installed"
fi
here=$PWD/$venv
library=$(dirname "$(find "$here/ze" -name 'libze_loader.so*' | head -n 1)"):$here/lib
export CC=${CXX:-g++} CPATH=$here/ze/usr/include LIBRARY_PATH=$library LD_LIBRARY_PATH=$library
# The order counts: this Triton before torch's environment, which has the other.
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export PYTHONPATH=$PWD/core:$PWD/plugins/triton_kernels:$own:$with_torch
unset TRITON_INTERPRET
exec "$venv/bin/python" plugins/triton_kernels/tests/kernel_compile.py --chips max1550 "$@"
