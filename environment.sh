# Sourced by the scripts: makes .venv with the pinned versions if it is not there or out of date, and enters it.
#   source ./environment.sh [extra …]      extras of pyproject.toml: test, tpu, cuda

_extras=$(IFS=,; echo "$*")
_python=${PYTHON:-python3}
_wanted="$_extras $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat .venv/installed 2>/dev/null)" != "$_wanted" ]; then
    if ! "$_python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        echo "$_python is $("$_python" -V 2>&1); Python 3.11 to 3.13 is needed: set PYTHON=python3.11" >&2
        exit 2
    fi
    echo "setting up .venv (once; about 1 GB) …"
    [ -x .venv/bin/python ] || "$_python" -m venv .venv
    # torch first and by itself, as a CPU build where there is one: models run in JAX, torch only traces them.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${_extras:+[$_extras]}"
    echo "$_wanted" > .venv/installed
fi
source .venv/bin/activate
unset _extras _python _wanted
