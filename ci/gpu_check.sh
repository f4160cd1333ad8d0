#!/usr/bin/env bash
# ci/gpu_check.sh [--help]: everything that needs a GPU: tests, compute-sanitizer, benchmarks. Results go to
# benchmarks/results/<gpu>/<date>-<commit>/, logs to .build/gpu-check/; fails if a step failed or could not run.
#
# With .gpu-bundle/ (make gpu-bundle) it needs python3 and torch alone, else it takes .venv and builds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -d .gpu-bundle ]; then
  path=$(ci/gpu_unpack.sh .gpu-bundle .build/site)
  export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
  exec python3 -m ci.gpu_check "$@"
fi
[ -x .venv/bin/python ] || ci/bootstrap.sh
exec .venv/bin/python -m ci.gpu_check "$@"
