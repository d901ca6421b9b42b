#!/usr/bin/env bash
# Sets up .venv if it is not there, then runs the tests: `bash tests/run.sh [pytest arguments]`.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE   # each of the processes that tests start would compile all sources
source ./environment.sh test pod   # pod: trm compile-pod compiles for TPUs in the tests
# One process keeps one core busy, but when it waits for others: three for two cores take 13 % less time than two.
workers=$(python -c 'import os; print(max(1, 3 * (os.cpu_count() or 1) // 2))')
exec python -m pytest -n "$workers" --dist worksteal "$@"
