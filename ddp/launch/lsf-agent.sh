#!/bin/bash
# torchrun's agent on one host of a job of LSF: lsf.bsub has blaunch start it on each.
cd "$JOB_DIR" || exit
set -f # FLAGS is split into words, and no more
host=$(hostname)
is_host=0
[ "${host%%.*}" != "${HEAD_HOST%%.*}" ] || is_host=1 # LSF may give names with or without a domain
exec torchrun --nnodes="$HOSTS" --nproc-per-node=$((SLOTS / HOSTS)) --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD_HOST:$((20000 + LSB_JOBID % 10000))" --rdzv-id="$LSB_JOBID" \
    --rdzv-conf="is_host=$is_host" --local-addr="$host" \
    -m ddp.train --auto-resume --run-dir "$RUN_DIR" $FLAGS
