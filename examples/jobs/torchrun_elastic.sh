#!/bin/bash
# One of these on every node, no scheduler: the agents find each other, and continue with fewer.
set -euo pipefail

ROOT=${ROOT:?the checkpoint root of this run}
HEAD=${HEAD:?name and port of the first node, as node001:29400}

# What follows the -- are the arguments of torchrun. train.py asks for the step itself: a path
# given here would be the same one in all attempts.
exec ckptctl run --root "$ROOT" --create --log-dir "${LOGS:-logs}" --torchrun -- \
    --nnodes="${MIN_NODES:-1}:${MAX_NODES:-4}" --nproc-per-node="${GPUS:-8}" \
    --rdzv-endpoint="$HEAD" --rdzv-id="${RUN:-train}" \
    train.py --root "$ROOT" --resume-from auto
