# Sourced in the folder of the project: creates .venv with the pinned versions if it is missing or out of date, and activates it.
#   source ./environment.sh [extra …]      extras of pyproject.toml beside `train`: huggingface, examples, text, chat, test, …;
#                                          and pod, the TPU compiler, and gpu-aot, that for NVIDIA GPUs
#   source ./environment.sh newest [extra …]      .venv-newest with Python 3.13 and the newest releases, constraints-newest.txt;
#                                          status 3 if there is no Python 3.13
#
# For bash and zsh. A shell that sources it goes on after a failure: the status says whether everything is installed.

_trm_environment() {
    unset -f _trm_environment                                # the shell keeps nothing but what `activate` defines
    local venv=.venv pins=constraints.txt python=${PYTHON:-python3} newest=""
    case " $* " in *" newest "*) venv=.venv-newest pins=constraints-newest.txt python=${PYTHON:-} newest=yes ;; esac
    (                                                        # a subshell, in which `exit` ends nothing else
        refuse() { echo "$1" >&2; exit "${2:-2}"; }
        find_newest() {                                      # pyenv's python3.13 runs nothing while another one is selected
            { echo python3.13; find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -maxdepth 3 -path '*/3.13.*/bin/python3.13'; } |
                while read -r candidate; do
                    "$candidate" -c 'import venv, ensurepip' && echo "$candidate" && break
                done
        } 2>/dev/null
        has_compiler() { gcc --version && objdump --version && nm --version; } >/dev/null 2>&1
        fail() {
            echo "pip failed, and $venv is not complete for:$missing; source environment.sh again when its reason is gone" >&2
            exit 1
        }
        pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$pins" "$@" || fail; }
        [ -f pyproject.toml ] && [ -f "$pins" ] || refuse "no pyproject.toml here: source it in the folder of the project"
        record=$venv/installed.$(cat pyproject.toml "$pins" | cksum | tr -d ' ')   # a line per extra with these pins
        missing="" extras=train
        for extra in base "$@"; do
            grep -qx -e "$extra" "$record" 2>/dev/null || missing="$missing $extra"
            case $extra in base | pod | gpu-aot | newest) continue ;; esac
            grep -q "^$extra = \[" pyproject.toml || refuse "$extra is no extra of pyproject.toml; see the top of environment.sh"
            extras="$extras,$extra"
        done
        [ -n "$missing" ] || exit 0

        [ -n "$python" ] || python=$(find_newest)
        [ -n "$python" ] || refuse "there is no Python 3.13 here: install it, or set PYTHON" 3
        "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
            refuse "$python is $("$python" -V 2>&1); Python 3.11 to 3.13 is needed: set PYTHON=python3.11"
        echo "setting up $venv:$missing (about 2 GB the first time) …"
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" || exit 1
        # torch first and by itself, so that a CPU build where there is one is kept: models run in JAX, torch traces them.
        if [ -n "$newest" ] && has_compiler && ! command -v nvidia-smi >/dev/null; then
            "$venv/bin/python" tests/torch_on_a_cpu.py "$(grep '^torch==' "$pins")" || fail
        else
            pip torch
        fi
        pip -e ".[$extras]"
        case " $* " in
        *" pod "*) pip --no-deps --upgrade --target "$venv/pod" libtpu ;;   # apart: JAX would search for a TPU in every program
        esac
        case " $* " in
        *" gpu-aot "*)
            pip --no-deps --upgrade --target "$venv/gpu-aot" \
                jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm ;;
        esac
        for extra in base "$@"; do
            grep -qx -e "$extra" "$record" 2>/dev/null || echo "$extra" >> "$record"
        done
    ) && source "$venv/bin/activate"
}

_trm_environment "$@"
