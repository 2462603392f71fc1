#!/usr/bin/env bash
# Build a wheel of every distribution of this checkout. Nothing is left beside the sources, and nothing that lies there from earlier
# builds gets in. Needs torch and setuptools, as `make install` leaves them; no index is asked.
#
#   tools/make_wheels.sh [OUT [FOLDER...]]     OUT=dist, all folders     VENV=.venv  OARLOCK_CPU_KERNELS=1|0
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-dist}
folders=("${@:2}")
[ ${#folders[@]} -gt 0 ] || folders=(. backends/*/ plugins/*/)
# A wheel that is to be carried elsewhere holds the kernels, unless it is said that it shall not.
export OARLOCK_CPU_KERNELS=${OARLOCK_CPU_KERNELS:-1}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export DIST_EXTRA_CONFIG=$scratch/setup.cfg
for folder in "${folders[@]}"; do
  [ -f "$folder/pyproject.toml" ] || continue
  work=$(mktemp -d "$scratch/XXXXXX")
  printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' "$work" "$work" >"$DIST_EXTRA_CONFIG"
  "${VENV:-.venv}/bin/python" -m pip wheel -q --disable-pip-version-check --no-index --no-deps --no-build-isolation -w "$out" "./${folder#./}" \
    || { echo "make wheels: $folder was not built; its messages: pip wheel -v --no-deps --no-build-isolation $folder" >&2; exit 1; }
done
ls "$out"/*.whl
