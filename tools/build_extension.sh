#!/usr/bin/env bash
# Builds mok._C for another Python than the one in use, for a machine that has a GPU but should not have to compile:
#     tools/build_extension.sh INCLUDE OUTPUT
# INCLUDE: the folder of that Python's Python.h. OUTPUT: the file to write; as mok/_C.so on that machine, mok finds it.
# The CUDA runtime is linked statically, so nothing but the driver is needed there. MOK_ARCH says for which GPUs.
set -euo pipefail
[[ $# -eq 2 && -f $1/Python.h ]] || { sed -n '2,5s/^# \?//p' "$0"; exit 2; }
include=$(realpath "$1")
output=$(realpath -m "$2")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
MOK_PYTHON_INCLUDE=$include python3 setup.py --quiet build_ext --build-lib "$work/lib" --build-temp "build/$(basename "$include")"
mkdir -p "$(dirname "$output")"
cp "$work"/lib/mok/_C*.so "$output"
