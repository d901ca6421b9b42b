#!/usr/bin/env bash
# Sets up .venv if it is not there, then runs the tests: `bash tests/run.sh [pytest arguments]`.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE   # each of the processes that tests start would compile all sources
source ./environment.sh test pod   # pod: trm compile-pod compiles for TPUs in the tests
exec python -m pytest -n auto --dist worksteal "$@"   # one process a core: compiling keeps only one busy
