#!/usr/bin/env bash
# What `trm launch` runs on the workers of a TPU, by ssh, in the folder of the launch (~/trm-launches/NAME):
#
#   worker.sh install EXTRA…                    makes the environment of the code in code/
#   worker.sh start ID SECONDS VARIABLE=… -- …  starts the command after --, unless ID was started before
#   worker.sh follow ID BYTES MARK              prints the mark, and its log from that byte on, until it ends
#   worker.sh status ID                         prints: none, running, lost, or ended STATUS
#   worker.sh stop ID                           sends SIGTERM to it and all that it started
#   worker.sh pack PATH                         packs a folder of the run into results.tar
#
# A start has a folder of its own, ID/, with log, process and status. Its process belongs to no terminal and to no
# connection. What is on the command line is data here: it is never evaluated.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

process() { cat "$1/process" 2>/dev/null || true; }             # its number and the boot of the machine that it is of

alive() {
    local number boot
    read -r number boot <<<"$(process "$1")" || true
    [ -n "${number:-}" ] && [ "$boot" = "$(cat /proc/sys/kernel/random/boot_id)" ] && kill -0 "$number" 2>/dev/null
}

python_of_this_machine() {
    local name
    for name in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        if [ -n "$name" ] && "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
        then echo "$name"; return; fi
    done
    sudo apt-get install -qq -y python3.11 python3.11-venv >&2   # the images of TPU VMs have Python 3.10
    echo python3.11
}

install() {
    cd code
    PYTHON=$(python_of_this_machine)
    export PYTHON
    printf '%s\n' "$@" > ../extras
    source ./environment.sh "$@"
}

start() {
    local id=$1 other
    for other in */process; do
        [ -e "$other" ] && alive "${other%/process}" && [ "${other%/process}" != "$id" ] || continue
        echo "another run is going on here: ${other%/process}" >&2
        exit 3
    done
    mkdir "$id" 2>/dev/null || exit 0                           # the answer to the first start was lost
    setsid bash "$PWD/code/train_jax/pods/launch/worker.sh" run "$@" </dev/null >"$id/log" 2>&1 &
}

run() {                                                         # in a session of its own
    local id=$1 seconds=$2 line status=0 folder=$PWD
    shift 2
    is_process "$folder/$id" "$$"
    trap 'ended "$folder/$id" $?' EXIT
    trap 'exit 143' TERM
    cd code
    mapfile -t extras < ../extras
    source ./environment.sh "${extras[@]}"
    [ ! -d compiled ] || export JAX_COMPILATION_CACHE_DIR=$PWD/compiled
    while [ "$1" != -- ]; do export "${1?}"; shift; done
    shift
    if [ -e ../environment ]; then                              # secrets: read once, then only this process has them
        while IFS= read -r line || [ -n "$line" ]; do
            case $line in '' | \#*) ;; *) export "${line?}" ;; esac
        done < ../environment
        rm -f ../environment
    fi
    export PYTHONUNBUFFERED=1
    local command=("$@")
    [ "$seconds" = 0 ] || command=(timeout --signal=TERM --kill-after=300 "$seconds" "$@")
    trap : TERM                                                 # from here on, `stop` ends the command, not this script
    setsid "${command[@]}" &                                    # a group of its own
    local child=$!
    is_process "$folder/$id" "$child"
    [ ! -e "$folder/$id/stop" ] || stop "$folder/$id"           # it was asked to stop before it was there
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do status=0; wait "$child" || status=$?; done   # a signal ended the wait
    exit "$status"
}

is_process() {                                                  # in one step, so that no reader sees half of it
    echo "$2 $(cat /proc/sys/kernel/random/boot_id)" > "$1/process.part"
    mv "$1/process.part" "$1/process"
}

ended() {
    echo "$2" > "$1/status.part"
    mv "$1/status.part" "$1/status"
}

status() {
    if [ -e "$1/status" ]; then echo "ended $(cat "$1/status")"
    elif [ ! -e "$1" ]; then echo none
    elif alive "$1"; then echo running
    else
        sleep 1                                                 # it begins, or ended and its status is not there yet
        if alive "$1"; then echo running; return; fi
        [ -e "$1/status" ] && echo "ended $(cat "$1/status")" || echo lost
    fi
}

follow() {
    local id=$1 bytes=$2 number turns=0
    echo "$3"
    until [ -e "$id/process" ] || [ -e "$id/status" ]; do
        [ -e "$id" ] && [ "$((turns += 1))" -lt 300 ] || exit 4  # 30 seconds: the machine went down when it began
        sleep 0.1
    done
    read -r number _ <<<"$(process "$id")"
    if alive "$id"; then exec tail -c "+$((bytes + 1))" -f --pid="$number" -s 0.2 -- "$id/log"; fi
    tail -c "+$((bytes + 1))" -- "$id/log"
}

stop() {
    local number
    [ -e "$1" ] || return 0
    touch "$1/stop"
    alive "$1" || return 0                                      # ended, or it finds the file when it begins
    read -r number _ <<<"$(process "$1")"
    kill -TERM -- "-$number" 2>/dev/null || kill -TERM "$number" 2>/dev/null || true   # it may have no group yet
}

pack() {
    local path=$1
    case $path in /*) ;; *) path=$PWD/code/$path ;; esac
    tar -C "$(dirname -- "$path")" -cf results.part -- "$(basename -- "$path")"
    mv results.part results.tar
}

command=$1
shift
case $command in
install | start | run | follow | status | stop | pack) "$command" "$@" ;;
*) echo "worker.sh: no command $command" >&2; exit 2 ;;
esac
