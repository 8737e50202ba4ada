"""NVRx: load a verified local checkpoint, and share heartbeats with `ckptctl run`.

    manager = VerifiedLocalCheckpointManager("/local/checkpoints", session_id="run-7")
    if manager.find_latest() != -1:
        state, _ = manager.load()

    share_heartbeats()  # before the training makes its `fault_tolerance.RankMonitorClient`

Source: nvidia-resiliency-ext 0.4.1 `checkpointing/local/ckpt_managers/base_manager.py`,
`local_manager.py`, `fault_tolerance/rank_monitor_client.py`,
`ptl_resiliency/fault_tolerance_sections_callback.py`.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from nvidia_resiliency_ext import fault_tolerance
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

from ckptctl.errors import StorageError
from ckptctl.formats.own.heartbeats import Reported
from ckptctl.records.verification import check_whole
from ckptctl.storage.shared_places import open_named
from ckptctl.train import heartbeat
from ckptctl.train.ledger import to_stderr

__all__ = ["ReportingRankMonitorClient", "VerifiedLocalCheckpointManager", "share_heartbeats"]

_SECTIONS: dict[str, Reported] = {
    "setup": "setup",
    "checkpointing": "checkpoint",
    "evaluation": "evaluation",
}
"""The sections that Megatron-LM and the callbacks of NVRx name, except `step`; the last is ours."""


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
            os.fdopen(open_named(str(path)), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            found = check_whole(view)
    except ValueError:
        return "it is empty"
    except (OSError, StorageError) as error:
        return str(error)
    if found.wrong is not None:
        return f"{found.wrong.names[0]} in it does not match its checksum"
    return found.unreadable


class ReportingRankMonitorClient(fault_tolerance.RankMonitorClient):
    """NVRx's client, whose heartbeats and sections are reported to `ckptctl run` as well.

    The time between two steps counts as `step`, until the end of the first one as
    `first-step`. A section whose name is not known is `outside`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._between: Reported | None = None  # while no section but `step` is open

    def init_workload_monitoring(self) -> None:
        """Connect to NVRx's monitor, which then has no open section."""
        super().init_workload_monitoring()
        self._open.clear()

    def send_heartbeat(self) -> None:
        heartbeat()
        super().send_heartbeat()

    def start_section(self, section: str) -> None:
        super().start_section(section)
        self._open.append(section)
        self._report()

    def end_section(self, section: str) -> None:
        super().end_section(section)
        self._open.remove(section)
        if section in ("setup", "step"):
            self._between = "first-step" if section == "setup" else "step"
        self._report()

    def end_all_sections(self) -> None:
        super().end_all_sections()
        self._open.clear()
        self._report()

    def _report(self) -> None:
        inner = [_SECTIONS.get(name, "outside") for name in self._open if name != "step"]
        heartbeat(inner[-1] if inner else self._between)


def share_heartbeats() -> None:
    """Report to `ckptctl run` what NVRx's client gets, too; call it before one is made.

    Megatron-LM and the callbacks for Lightning make a `fault_tolerance.RankMonitorClient` by
    this name, which has no hooks.
    """
    fault_tolerance.RankMonitorClient = ReportingRankMonitorClient
