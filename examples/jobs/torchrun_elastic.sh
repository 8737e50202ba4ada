#!/bin/bash
# One of these on every node, no scheduler: torchrun finds the others, and continues with fewer.
set -euo pipefail

ROOT=${ROOT:?the checkpoint root of this run}
HEAD=${HEAD:?name and port of the first node, as node001:29400}

# train.py asks for the step itself, in each of torchrun's restarts: a path given here would
# be the same one in all of them. A storage that does not answer ends the script now.
ckptctl pick --quiet --allow-fresh --create "$ROOT" > /dev/null

# The files of the first error of each rank are for: ckptctl classify "$errors"
errors=$(mktemp -d "${TMPDIR:-/tmp}/errors-XXXXXX")
echo "error files: $errors" >&2

# Each restart gets a store of its own: in a shared one ranks may find those of the attempt before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="${MIN_NODES:-1}:${MAX_NODES:-4}" --nproc-per-node="${GPUS:-8}" \
    --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="${RUN:-train}" \
    --log-dir="$errors" train.py --root "$ROOT" --resume-from auto
