#!/usr/bin/env bash
# The bridge, the models and one run of every task with Python 3.13 and the newest releases, constraints-newest.txt, in .venv-newest.
# On a machine without Python 3.13, or whose package index does not answer, it says so and passes.
set -euo pipefail
cd "$(dirname "$0")/.."
skip() {
    printf '\n%s\n' "**** THE NEWEST RELEASES ARE NOT TESTED: $1 ****"
    exit 0
}

export PIP_CONSTRAINT=$PWD/constraints-newest.txt      # in place of pins in pip's own settings, which may hold torch back
index_answers() { python3 -m pip download --quiet --no-deps --no-cache-dir --dest "$(mktemp -d)" iniconfig; }
source ./environment.sh newest test || case $? in
    3) skip "there is no Python 3.13 here" ;;
    *)
        index_answers || skip "the package index does not answer; pip's own words are above"
        echo "the newest releases cannot be installed although the package index answers: constraints-newest.txt or pyproject.toml is wrong" >&2
        exit 1
        ;;
esac
python -m bridge doctor
python -m pytest -n auto --dist worksteal tests/bridge tests/models_torch
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
bash tests/all_tasks.sh "$folder" > "$folder/log" 2>&1 || { tail -50 "$folder/log"; exit 1; }
tail -1 "$folder/log"
