#!/usr/bin/env bash
# Encodes a text data set on eight nodes, as an array of SLURM; the folders are on a disk that all nodes share:
#   encode=$(sbatch --parsable docs/engines/text_slurm.sh --source /shared/texts --tokenizer /shared/tokenizer \
#       --output-dir /shared/data/text --parts-dir /shared/parts)
#   sbatch --dependency="afterok:$encode" --array=0 --export=ALL,JOIN=1 docs/engines/text_slurm.sh [the same options]
# A node that fails is queued again by `scontrol requeue`, and encodes only what is missing.
#SBATCH --job-name=trm-text
#SBATCH --array=0-7
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=trm-text-%A-%a.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?started by sbatch}"
source ./environment.sh text                            # on a shared disk: made once, used by every node

part=(--part "$((SLURM_ARRAY_TASK_ID + 1))/$SLURM_ARRAY_TASK_COUNT")
[ -z "${JOIN:-}" ] || part=()
trm build-data text "$@" "${part[@]}"
