#!/usr/bin/env bash
# What can only be measured on a GPU, from the source tree alone: tests/gpu/run.sh {kit|kernels|serve|sanitize|all|report} [options]
# See README.md beside this file. PYTHON names the interpreter that has torch.
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_run.py" "$@"
