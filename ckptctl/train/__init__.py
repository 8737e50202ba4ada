"""The names that a training script uses.

Each name is imported on first use: a script that only needs the job's environment does not
load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.errors import MissingExtra

if TYPE_CHECKING:
    from ckptctl.distributed.launcher import Cluster, cluster_context
    from ckptctl.distributed.process_group import ProcessGroup, make_group
    from ckptctl.train.checkpointer import Checkpointer
    from ckptctl.train.graceful import GracefulStop, outlive_stop
    from ckptctl.train.heartbeats import heartbeat
    from ckptctl.train.job import Start
    from ckptctl.train.liveness import GpuReport, Liveness, check_gpu, ping, simulate_fault
    from ckptctl.train.loss_guard import GuardVerdict, LossAction, LossGuard, LossKind
    from ckptctl.train.reader import Reader
    from ckptctl.train.resolving import resolve
    from ckptctl.train.samples import GlobalLoader, Order, SamplesDigest, samples_digest
    from ckptctl.train.writer import Writer

__all__ = [
    "Checkpointer",
    "Cluster",
    "GlobalLoader",
    "GpuReport",
    "GracefulStop",
    "GuardVerdict",
    "Liveness",
    "LossAction",
    "LossGuard",
    "LossKind",
    "Order",
    "ProcessGroup",
    "Reader",
    "SamplesDigest",
    "Start",
    "Writer",
    "check_gpu",
    "cluster_context",
    "heartbeat",
    "make_group",
    "outlive_stop",
    "ping",
    "resolve",
    "samples_digest",
    "simulate_fault",
]

_HOMES = {
    "ckptctl.train.checkpointer": "Checkpointer",
    "ckptctl.train.job": "Start",
    "ckptctl.distributed.launcher": "Cluster cluster_context",
    "ckptctl.train.graceful": "GracefulStop outlive_stop",
    "ckptctl.train.heartbeats": "heartbeat",
    "ckptctl.distributed.process_group": "ProcessGroup make_group",
    "ckptctl.train.liveness": "GpuReport Liveness check_gpu ping simulate_fault",
    "ckptctl.train.loss_guard": "GuardVerdict LossAction LossGuard LossKind",
    "ckptctl.train.reader": "Reader",
    "ckptctl.train.resolving": "resolve",
    "ckptctl.train.writer": "Writer",
    "ckptctl.train.samples": "GlobalLoader Order SamplesDigest samples_digest",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


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
