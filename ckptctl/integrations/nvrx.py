"""NVRx: find the newest local checkpoint whose files every rank has verified.

    manager = VerifiedLocalCheckpointManager("/local/checkpoints", session_id="run-7")
    if manager.find_latest() != -1:
        state, _ = manager.load()

Source: nvidia-resiliency-ext 0.4.1 `checkpointing/local/ckpt_managers/base_manager.py`,
`local_manager.py`.
"""

from __future__ import annotations

import mmap
from typing import Any

from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

from ckptctl.records.verification import check_whole
from ckptctl.train.ledger import to_stderr

__all__ = ["VerifiedLocalCheckpointManager"]


class VerifiedLocalCheckpointManager(LocalCheckpointManager):
    """NVRx's manager of local checkpoints; a damaged file counts as one that is missing.

    NVRx decides by the names of files. Here each rank compares every byte of its own files
    with the checksums in them before `find_latest` asks which iteration all ranks have. After
    a save the file that was written is read back. The decision stays NVRx's: no storage that
    all ranks see is needed.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._sound: dict[Any, tuple[int, int]] = {}

    def _my_ckpt_ids(self) -> list[Any]:
        checked, self._sound = self._sound, {}
        for ckpt_id in super()._my_ckpt_ids():
            path = self._local_ckpt_path_from_id(ckpt_id)
            state = path.stat()
            version = (state.st_size, state.st_mtime_ns)
            why = None if checked.get(ckpt_id) == version else _damage(path)
            if why is None:
                self._sound[ckpt_id] = version
            else:
                to_stderr(f"warning: {path} is not used: {why}")
        return list(self._sound)


def _damage(path: Any) -> str | None:
    """Why a file is not one that `torch.save` has written; None for a sound one."""
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            found = check_whole(view)
    except ValueError:
        return "it is empty"
    except OSError as error:
        return str(error)
    if found.wrong is not None:
        return f"{found.wrong.names[0]} in it does not match its checksum"
    return found.unreadable
