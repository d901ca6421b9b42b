#!/usr/bin/env bash
# The bridge, the models and one run of every task with Python 3.13 and the newest releases, constraints-newest.txt, in .venv-newest.
# On a machine without Python 3.13, or whose package index does not answer, it says so and passes.
set -euo pipefail
cd "$(dirname "$0")/.."
skip() {
    printf '\n%s\n' "**** THE NEWEST RELEASES ARE NOT TESTED: $1 ****"
    exit 0
}

PYTHON=""
for python in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python; do
    if "$python" -c 'import venv, ensurepip' 2>/dev/null; then PYTHON=$python; fi
done
[ -n "$PYTHON" ] || skip "there is no Python 3.13 here; install it, or set PYENV_ROOT"
export PYTHON

export PIP_CONSTRAINT=$PWD/constraints-newest.txt      # in place of pins in pip's own settings, which may hold torch back
venv=.venv-newest/bin/python
torch=$(sed -n 's/^torch==//p' constraints-newest.txt)
"$venv" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv .venv-newest
index_answers() { "$venv" -m pip download --quiet --no-deps --no-cache-dir --dest "$(mktemp -d)" iniconfig; }
failed() {
    index_answers || skip "the package index does not answer; pip's own words are above"
    echo "the newest releases cannot be installed although the package index answers: constraints-newest.txt or pyproject.toml is wrong" >&2
    exit 1
}
has_torch() { "$venv" -c "import sys, torch; sys.exit(torch.__version__.partition('+')[0] != '$torch')" 2>/dev/null; }
has_compiler() { gcc --version && objdump --version && nm --version; } >/dev/null 2>&1
if ! has_torch && has_compiler && ! command -v nvidia-smi >/dev/null; then
    "$venv" tests/torch_on_a_cpu.py "torch==$torch" || failed
fi
source ./environment.sh newest test || failed
python -m bridge doctor
python -m pytest -n auto --dist worksteal tests/bridge tests/models_torch
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
bash tests/all_tasks.sh "$folder" > "$folder/log" 2>&1 || { tail -50 "$folder/log"; exit 1; }
tail -1 "$folder/log"
