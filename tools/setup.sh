#!/usr/bin/env bash
# Makes the checkout's own environment: a virtual environment with cakegen (editable) and its development tools.
#
#   tools/setup.sh FOLDER
#
# Everything but torch is installed by its hash (tools/lock.txt), the build back end included; cakegen itself is built
# from the checkout without an index.
#
# CAKEGEN_TORCH   what pip installs for torch (default torch==2.13.0); see README.md for a CPU-only machine.
#
# Where there is an NVIDIA GPU and python3 already imports torch, that torch is used and none is installed.
set -euo pipefail

venv=${1:?usage: tools/setup.sh FOLDER}
root=$(cd "$(dirname "$0")/.." && pwd)
torch=${CAKEGEN_TORCH:-torch==2.13.0}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

has_gpu_torch() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 &&
        "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
}

python=
options=()
if supported python3 && has_gpu_torch python3; then
    python=python3
    options=(--system-site-packages)
    torch=
else
    for candidate in python3.11 python3.12 python3.13 python3; do
        if supported "$candidate"; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "tools/setup.sh: needs Python 3.11, 3.12 or 3.13; found $(python3 --version 2>&1 || echo none)" >&2
    exit 1
fi

echo "setting up $venv with $("$python" --version), ${torch:-the torch of $python}"
"$python" -m venv --clear "${options[@]}" "$venv"
pip=("$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
"${pip[@]}" --require-hashes --requirement "$root/tools/lock.txt"
if [ -n "$torch" ]; then
    "${pip[@]}" "$torch"
fi
"${pip[@]}" --no-deps --no-build-isolation --editable "$root"
