#!/usr/bin/env bash
# Creates .venv with everything that building and testing need. Needs python3 with venv and g++.
# Does nothing when pyproject.toml and this file are the ones it last ran with.
set -euo pipefail
cd "$(dirname "$0")/.."

# One at a time: `make -j` may start several.
exec 9<ci/bootstrap.sh
flock 9

stamp=.venv/bootstrap.sha256
wanted=$(cat pyproject.toml ci/bootstrap.sh ci/toolchain.py | sha256sum)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

step() { printf 'bootstrap %s (%ds)\n' "$1" "$SECONDS"; }
# On a terminal pip's own bars show the progress; elsewhere only what goes wrong is of interest.
quiet=-qq
[ -t 1 ] && quiet=
pip() { .venv/bin/python -m pip --disable-pip-version-check install $quiet "$@"; }

command -v g++ >/dev/null || { echo "bootstrap: g++ is missing (apt-get install g++)" >&2; exit 1; }
step "[1/4] .venv"
python3 -m venv .venv || { echo "bootstrap: python3 needs venv (apt-get install python3-venv)" >&2; exit 1; }
torch=$(grep -oE 'torch==[0-9.]+' pyproject.toml | head -1)
step "[2/4] $torch, the largest download"
pip "$torch"
step "[3/4] tools for building and testing"
pip -e '.[build,test,dev]'
step "[4/4] CUDA compiler"
if ! .venv/bin/python -m ci.toolchain; then
  pip -e '.[nvcc]'
  .venv/bin/python -m ci.toolchain
fi
echo "$wanted" >"$stamp"
step "done"
