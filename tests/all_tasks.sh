#!/usr/bin/env bash
# One small run of every task with the installed releases, through its commands: `bash tests/all_tasks.sh FOLDER`.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
cd "$1"
step() { printf '\n==> %s\n' "$*"; "$@"; }
gpt=(--arch.n-layer 1 --arch.n-embd 64 --arch.n-head 2 --arch.n-kv-head 2)

step trm build-data sudoku --size 4 --num-train 200 --num-test 50 --output-dir sudoku
step trm train tiny --data-dir sudoku --run-dir runs/puzzles
step trm evaluate runs/puzzles
step trm export runs/puzzles                                     # the same answers in PyTorch
step trm report runs/puzzles

step trm build-data text --source "$here/docs" --test-share 0.2 --vocab-size 512 --output-dir text
step trm train chat-tiny --data-dir text --run-dir runs/language --steps 10 "${gpt[@]}"
step trm evaluate runs/language

step trm build-data chat --tokenizer text --output-dir talks --tasks identity:20 spelling:200
step trm train chat-tiny --phase sft --init-from runs/language --data-dir talks --run-dir runs/chat --steps 5
step trm train chat-tiny --phase rl --init-from runs/chat --run-dir runs/rollouts --steps 2 \
    --problems arithmetic,digits=1:20 --max-tokens 8 --global-batch-size 16 --samples 8

for i in {1..400}; do echo "{\"instruction\": \"say $i twice\", \"response\": \"$i $i\"}"; done > samples.jsonl
step trm build-data instructions --source samples.jsonl --test-share 0.2 --tokenizer text --output-dir instructions
step trm train hrm-text-tiny --data-dir instructions --run-dir runs/instructions --steps 5 --eval-every-steps 0 --global-batch-size 8
for run in puzzles language chat rollouts instructions; do [ -e "runs/$run/FINISHED" ]; done
echo "one run of every task finished"
