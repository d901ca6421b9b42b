#!/usr/bin/env bash
# Sets up .venv if it is not there, then runs the tests: `bash tests/run.sh [pytest arguments]`.
set -euo pipefail
cd "$(dirname "$0")/.."
source ./environment.sh test pod   # pod: trm compile-pod compiles for TPUs in the tests
exec python -m pytest -n auto --dist worksteal "$@"
