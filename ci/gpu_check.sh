#!/usr/bin/env bash
# ci/gpu_check.sh [--help]: everything that needs a GPU: tests, compute-sanitizer, benchmarks. Results go to
# benchmarks/results/<gpu>/<date>-<commit>/, logs to .build/gpu-check/; fails until each step has passed, in
# this call or an earlier one for the same commit and day.
#
# In a checkout it takes .venv and brings the builds up to date; without .venv, with .gpu-bundle/ (make gpu-bundle), it
# needs python3 and torch alone.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/python ] && [ -d .gpu-bundle ]; then
  path=$(ci/gpu_unpack.sh .gpu-bundle .build/site)
  export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
  # The bundle's builds are what is tested and measured, whatever git says of this copy.
  WARPSMITH_COMMIT=$(cat .gpu-bundle/builds/commit)
  export WARPSMITH_COMMIT
  exec python3 -m ci.gpu_check "$@"
fi
[ -x .venv/bin/python ] || ci/bootstrap.sh
exec .venv/bin/python -m ci.gpu_check "$@"
