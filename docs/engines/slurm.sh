#!/usr/bin/env bash
# A job of SLURM, one process on each node:  sbatch --export=ALL,RUNS=/shared/runs,DATA=/shared/data docs/engines/slurm.sh
# The folders are on a disk that all nodes share. Before its time is over, and before a preemption, the run is told to
# save, and the job is queued again.
#SBATCH --job-name=trm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=trm-%j.log
set -euo pipefail

preset=${PRESET:-sudoku-extreme}
cd "${SLURM_SUBMIT_DIR:?started by sbatch}"
source ./environment.sh cuda                            # on a shared disk: made once, used by every node

JAX_COORDINATOR_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1):8476"
export JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES="$SLURM_NTASKS"

trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM     # to every process of the run, which saves and ends with 75
srun --kill-on-bad-exit=0 --label bash -c 'export JAX_PROCESS_ID=$SLURM_PROCID; exec trm train "$@"' train \
    "$preset" --data-dir "${DATA:?}/$preset" --run-dir "${RUNS:?}/$preset" --restarts 10 &
status=0
wait $! || status=$?
[ "$status" -le 128 ] || { status=0; wait $! || status=$?; }    # the first wait ended with the signal
if [ "$status" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
