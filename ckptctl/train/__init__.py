"""The names that a training script uses.

Each name is imported on first use: a script that only needs the job's environment does not
load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.errors import MissingExtra

if TYPE_CHECKING:
    from ckptctl.distributed.launcher import Cluster as Cluster
    from ckptctl.distributed.launcher import cluster_context as cluster_context
    from ckptctl.distributed.process_group import ProcessGroup as ProcessGroup
    from ckptctl.distributed.process_group import make_group as make_group
    from ckptctl.train.checkpointer import Checkpointer as Checkpointer
    from ckptctl.train.data_ledger import DataLedger as DataLedger
    from ckptctl.train.graceful import GracefulStop as GracefulStop
    from ckptctl.train.graceful import outlive_stop as outlive_stop
    from ckptctl.train.heartbeats import heartbeat as heartbeat
    from ckptctl.train.liveness import GpuReport as GpuReport
    from ckptctl.train.liveness import Liveness as Liveness
    from ckptctl.train.liveness import check_gpu as check_gpu
    from ckptctl.train.liveness import ping as ping
    from ckptctl.train.loss_guard import GuardVerdict as GuardVerdict
    from ckptctl.train.loss_guard import LossAction as LossAction
    from ckptctl.train.loss_guard import LossGuard as LossGuard
    from ckptctl.train.loss_guard import LossKind as LossKind
    from ckptctl.train.reader import Reader as Reader
    from ckptctl.train.resolving import resolve as resolve
    from ckptctl.train.restoring import Start as Start
    from ckptctl.train.samples import GlobalLoader as GlobalLoader
    from ckptctl.train.samples import Order as Order
    from ckptctl.train.samples import SamplesDigest as SamplesDigest
    from ckptctl.train.samples import samples_digest as samples_digest
    from ckptctl.train.writer import Writer as Writer

_HOMES = {
    "ckptctl.train.checkpointer": "Checkpointer",
    "ckptctl.train.data_ledger": "DataLedger",
    "ckptctl.train.restoring": "Start",
    "ckptctl.distributed.launcher": "Cluster cluster_context",
    "ckptctl.train.graceful": "GracefulStop outlive_stop",
    "ckptctl.train.heartbeats": "heartbeat",
    "ckptctl.distributed.process_group": "ProcessGroup make_group",
    "ckptctl.train.liveness": "GpuReport Liveness check_gpu ping",
    "ckptctl.train.loss_guard": "GuardVerdict LossAction LossGuard LossKind",
    "ckptctl.train.reader": "Reader",
    "ckptctl.train.resolving": "resolve",
    "ckptctl.train.writer": "Writer",
    "ckptctl.train.samples": "GlobalLoader Order SamplesDigest samples_digest",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value: object = getattr(import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "torch":
            raise
        raise MissingExtra(
            f"ckptctl.train.{name} needs torch, which is not installed",
            next_command="pip install 'ckptctl[torch]'",
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
