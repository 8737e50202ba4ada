#!/bin/bash
# One of these on every node, no scheduler: the `ckptctl run` of all nodes agree on each attempt,
# and start torchrun again on all of them after a failure. See docs/run.md, "Several launchers".
set -euo pipefail

ROOT=${ROOT:?the checkpoint root of this run, on a storage that all nodes see}
NNODES=${NNODES:?how many nodes}
NODE_RANK=${NODE_RANK:?which of them this is, from 0}
GPUS=${GPUS:-8}

# Where nodes are gone the job continues with fewer; below MIN_NODES it ends with 94.
sizes=$(seq -s , "$((NNODES * GPUS))" "-$GPUS" "$((${MIN_NODES:-1} * GPUS))")

# exec: what ends this script must reach ckptctl. The time for a save after SIGTERM is torchrun's.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
exec ckptctl run --root "$ROOT" --create --log-dir "logs-${RUN:-train}" \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --world-sizes "$sizes" -- \
    torchrun '--nnodes={nodes}' '--node-rank={node_rank}' --nproc-per-node="$GPUS" \
    --rdzv-backend=c10d '--rdzv-endpoint={head}:29400' --rdzv-id="${RUN:-train}" \
    train.py --root "$ROOT" --resume-from auto
