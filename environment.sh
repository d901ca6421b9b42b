# Sourced by the scripts: creates .venv with the pinned versions if it is missing or out of date, and activates it.
#   source ./environment.sh [extra …]      extras of pyproject.toml: text, chat, test, docs, serve, tpu, cuda, gcs; and pod, the TPU compiler

_python=${PYTHON:-python3}
_sum=$(cat pyproject.toml constraints.txt | cksum)
_done=.venv/installed.$(echo "$_sum" | tr -d ' ')       # one line per extra installed with these pins
_missing=""
for _extra in base "$@"; do grep -qx "$_extra" "$_done" 2>/dev/null || _missing="$_missing $_extra"; done
if [ -n "$_missing" ]; then
    if ! "$_python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        echo "$_python is $("$_python" -V 2>&1); Python 3.11 to 3.13 is needed: set PYTHON=python3.11" >&2
        exit 2
    fi
    echo "setting up .venv:$_missing (about 2 GB the first time) …"
    [ -x .venv/bin/python ] || "$_python" -m venv .venv
    # torch first and by itself, so that a CPU build where there is one is kept: models run in JAX, torch traces them.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
    _extras=$(for _extra in "$@"; do [ "$_extra" = pod ] || { printf "%s" "${_comma:-}$_extra"; _comma=,; }; done)
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${_extras:+[$_extras]}"
    case " $* " in *" pod "*)                            # apart, so that JAX does not search for a TPU in every program
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
            --target .venv/pod libtpu ;;
    esac
    for _extra in $_missing; do echo "$_extra" >> "$_done"; done
fi
source .venv/bin/activate
unset _python _sum _done _missing _extra _extras _comma
