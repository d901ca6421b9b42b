#!/usr/bin/env bash
# Eight workers of a sweep, one GPU each, as an array of SLURM; they share the runs by locks on the shared disk:
#   sbatch --export=ALL,RUNS=/shared/runs,DATA=/shared/data docs/engines/sweep_slurm.sh exp01 exp02b --seeds 3
# Before its time is over, and before a preemption, a worker is told to save, and is queued again.
#SBATCH --job-name=trm-sweep
#SBATCH --array=0-7
#SBATCH --gpus=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=trm-sweep-%A-%a.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?started by sbatch}"
source ./environment.sh cuda                            # on a shared disk: made once, used by every worker

trap 'kill -TERM $(jobs -p) || exit 75' TERM            # to the sweeper, whose run saves; both end with status 75
trm sweep "$@" --runs-root "${RUNS:?}" --data-root "${DATA:?}" --continue-on-failure &
status=0
wait $! || status=$?
[ "$status" -le 128 ] || { status=0; wait $! || status=$?; }    # the first wait ended with the signal
if [ "$status" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
