"""Megatron-LM, Megatron Bridge: resume from a proven step, load it with `Reader`, seal saves.

    install()  # before `pretrain`, in every process
    args.ckpt_step = resolve_iteration("auto", args.load)  # once the process group exists

Both save and load with `megatron.core.dist_checkpointing`, which has no hooks: `install`
replaces two of its functions. Source: megatron-core 0.16 `dist_checkpointing/serialization.py`,
`strategies/torch.py`; Megatron-LM `megatron/training/checkpointing.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Unpack

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.msc_utils import MultiStorageClientFeature

from ckptctl.distributed.process_group import make_group
from ckptctl.errors import PathNotFound
from ckptctl.integrations.recorder import Sealer, step_of
from ckptctl.options import PickKeywords
from ckptctl.storage.opening import open_store
from ckptctl.train import Reader, resolve
from ckptctl.train.ledger import to_stderr

__all__ = ["install", "resolve_iteration"]

_TRACKER = "latest_checkpointed_iteration.txt"


def resolve_iteration(
    resume_from: str | int, root: str, **keywords: Unpack[PickKeywords]
) -> int | None:
    """The iteration to load, for `--ckpt-step` (Bridge: `checkpoint.ckpt_step`); None if fresh.

    Every rank calls this. Megatron-LM starts from random weights where the tracker file is
    missing, and ends where it names no iteration, whatever `--ckpt-step` is: rank 0 writes it
    again if it does not name the step. Raises as `ckptctl.train.resolve` does.
    """
    iteration = step_of(resolve(resume_from, root, **keywords))
    if iteration is not None:
        make_group().from_first(lambda: _point(root, iteration))
    return iteration


def _point(root: str, iteration: int) -> None:
    with open_store(root) as store:
        try:
            found = store.read(_TRACKER, limit=100).decode(errors="replace").strip()
        except PathNotFound:
            found = ""
        if found != str(iteration):
            store.put(_TRACKER, str(iteration).encode(), replace=True)
            names = f"names {found!r}" if found else "is missing or empty"
            to_stderr(f"warning: {_TRACKER} {names}; it names {iteration} now")


def install(*, seal: bool = True) -> None:
    """Load with `Reader` from now on and, with `seal`, seal each save; call it on every rank.

    `Reader` runs no code from the shard files and compares what it reads with its checksums.
    The file `common.pt` is still loaded by Megatron. Addresses of the MultiStorageClient
    (`msc://`) keep Megatron's own reader.
    """
    own_reader = torch_strategy._get_filesystem_reader
    own_save: Callable[..., Any] = dist_checkpointing.save
    sealer: list[Sealer] = []  # made in the first save: by then the process group exists

    def reader(checkpoint_dir: str | os.PathLike[str], cache_metadata: bool = False) -> Any:
        if MultiStorageClientFeature.is_enabled():
            return own_reader(checkpoint_dir, cache_metadata)
        return Reader(checkpoint_dir)

    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **keywords: Any) -> Any:
        if not sealer:
            sealer.append(Sealer())
        request = own_save(sharded_state_dict, checkpoint_dir, *args, **keywords)
        path = os.fspath(checkpoint_dir)
        # Both end after a barrier that follows the writing of `metadata.json`.
        if request is None:
            sealer[0].complete(path)
        else:
            request.add_finalize_fn(lambda: sealer[0].complete(path))
        return request

    torch_strategy._get_filesystem_reader = reader
    if seal:
        dist_checkpointing.save = save
