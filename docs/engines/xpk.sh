#!/usr/bin/env bash
# A workload of XPK on a GKE cluster with v4 nodes:  BUCKET=my-bucket CLUSTER=mine ZONE=us-central2-b bash docs/engines/xpk.sh
# `--max-restarts` starts it again after a preemption; it continues from its newest checkpoint in storage.
set -euo pipefail

: "${BUCKET:?a bucket for data and runs}" "${CLUSTER:?a cluster that xpk cluster create made}" "${ZONE:?its zone}"
preset=${PRESET:-sudoku-extreme}

# XPK copies this folder into an image. Inside a worker, GKE gives the names of all hosts and the number of this one.
worker='
set -e
source ./environment.sh tpu gcs
export JAX_COORDINATOR_ADDRESS="${TPU_WORKER_HOSTNAMES%%,*}:8476"
export JAX_NUM_PROCESSES="$(echo "$TPU_WORKER_HOSTNAMES" | tr , "\n" | wc -l)"
export JAX_PROCESS_ID="$TPU_WORKER_ID"
exec trm train "$PRESET" --data-dir "gs://$BUCKET/data/$PRESET" --run-dir "gs://$BUCKET/runs/$PRESET"
'
xpk workload create \
    --cluster="$CLUSTER" --zone="$ZONE" \
    --workload="trm-$preset" \
    --tpu-type=v4-64 --num-slices=1 \
    --base-docker-image=python:3.11 --script-dir=. \
    --max-restarts=10 \
    --env="BUCKET=$BUCKET" --env="PRESET=$preset" \
    --command="bash -c $(printf %q "$worker")"
