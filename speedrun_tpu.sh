#!/usr/bin/env bash
# The whole story, from a bare clone to a trained model in PyTorch's hands:
#
#   install -> data -> preflight -> train -> evaluate -> solve one puzzle -> export and check in PyTorch -> report
#
#   bash speedrun_tpu.sh                 follows the device found: a CPU learns 9x9 Sudokus with half the cells
#                                        empty in minutes, an accelerator trains on Sudoku-Extreme
#   PROFILE=small bash speedrun_tpu.sh   6x6 Sudokus, half a minute of training
#   PROFILE=tiny bash speedrun_tpu.sh    runs through every stage in seconds and learns little
#
# Run again, it continues where it stopped, and does nothing twice. RUN_DIR and DATA_DIR say where things go.
set -euo pipefail
cd "$(dirname "$0")"

# ---- install -------------------------------------------------------------------------------------------------------
extra=""
if [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ] || [ -n "${TPU_NAME:-}" ]; then extra=tpu
elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra=cuda; fi
source ./environment.sh $extra

# ---- what this machine can do --------------------------------------------------------------------------------------
profile=${PROFILE:-}                                     # a host of a pod would wait for the others if JAX were asked
if [ -z "$profile" ] && [ "$extra" = tpu ]; then profile=extreme
elif [ -z "$profile" ]; then
    profile=$(python -c 'import jax; print("cpu" if jax.default_backend() == "cpu" else "extreme")')
fi
case $profile in
cpu)
    preset=sudoku9
    data=(--size 9 --num-train 50000 --num-test 1000 --num-empty 41)
    ;;
small)
    preset=sudoku6
    data=(--size 6 --num-train 20000 --num-test 1000 --num-empty 18)
    ;;
extreme)
    preset=sudoku-extreme
    data=(--source sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000)
    ;;
tiny)
    preset=tiny
    data=(--size 4 --num-train 200 --num-test 50)
    ;;
*)
    echo "PROFILE is '$profile'; use cpu, small, extreme or tiny" >&2
    exit 2
    ;;
esac
data_dir=${DATA_DIR:-data/speedrun-$profile}
run_dir=${RUN_DIR:-runs/speedrun-$profile}
step() { printf '\n==> %s\n' "$*"; }

# ---- data ----------------------------------------------------------------------------------------------------------
step "data: $data_dir"
trm build-data sudoku "${data[@]}" --output-dir "$data_dir"

# ---- preflight -----------------------------------------------------------------------------------------------------
if [ ! -e "$run_dir/FINISHED" ]; then
    step "preflight: what does not pass"
    quick=--quick                                        # without what compiles the model, which takes longer on a CPU
    if [ "$profile" = extreme ]; then quick=--no-quick; fi
    trm preflight "$preset" --data-dir "$data_dir" --run-dir "$run_dir" --brief $quick
fi

# ---- train, evaluate -----------------------------------------------------------------------------------------------
step "train: preset $preset, $run_dir"
trm train "$preset" --data-dir "$data_dir" --run-dir "$run_dir"

# ---- everything below reads the finished run and is not done twice -------------------------------------------------
if [ ! -e "$run_dir/report/index.html" ]; then
    step "solve one puzzle the model never saw"
    trm solve "$run_dir"
    step "export, and the same puzzles in plain PyTorch"
    trm export "$run_dir"
    step "report"
    trm report "$run_dir"
fi
step "done"
trm summary "$run_dir"
