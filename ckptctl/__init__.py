"""Choose the checkpoint to resume from, and check that the resume worked.

The public names. Importing the package imports neither torch nor s3fs, and a
function only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.diagnostics.diagnosing import doctor
    from ckptctl.diagnostics.results import Advice, Diagnosis
    from ckptctl.errors import (
        AccessDenied,
        CkptctlError,
        MissingExtra,
        NothingToResume,
        PathNotFound,
        StorageError,
        StorageUnavailable,
        UsageError,
    )
    from ckptctl.failures.classifying import classify
    from ckptctl.failures.results import Classification, Evidence
    from ckptctl.findings import Finding, Report, Severity, Verdict
    from ckptctl.formats.own.marks import Mark, MarkKind
    from ckptctl.goodput.estimating import RecoveryCost, recovery_cost
    from ckptctl.goodput.history import RunHistory, run_history
    from ckptctl.goodput.timeline import Goodput, PastAttempt
    from ckptctl.loss.checking import LossReport, check_loss
    from ckptctl.loss.verdict import LossVerdict
    from ckptctl.model import Level, StatePart, TrainState, WorldSize
    from ckptctl.options import (
        ContentOptions,
        PickPolicy,
        Requirements,
        StorageOptions,
        TrainOptions,
    )
    from ckptctl.preflight_checks.results import Check, Preflight
    from ckptctl.preflight_checks.running import preflight
    from ckptctl.resharding.comparing import diff
    from ckptctl.resharding.converting import convert
    from ckptctl.resharding.results import Converted, Diff, Difference, RankShare, Reshard
    from ckptctl.resharding.steps import plan_reshard, reshard
    from ckptctl.selection.marking import mark
    from ckptctl.selection.picking import pick
    from ckptctl.selection.pruning import Pruned, prune
    from ckptctl.selection.results import (
        Answer,
        Contents,
        Marked,
        PassedOver,
        Pick,
        PruneDecision,
        Scan,
        Sealed,
    )
    from ckptctl.selection.scanning import scan
    from ckptctl.selection.sealing import seal
    from ckptctl.selection.verifying import show, verify
    from ckptctl.selection.watching import Watched, watch
    from ckptctl.supervisor.nodes import NodeOptions
    from ckptctl.supervisor.restarting import keep_running
    from ckptctl.supervisor.results import Attempt, Supervised

__version__ = "0.1.0.dev0"

__all__ = [
    "AccessDenied",
    "Advice",
    "Answer",
    "Attempt",
    "Check",
    "CkptctlError",
    "Classification",
    "ContentOptions",
    "Contents",
    "Converted",
    "Diagnosis",
    "Diff",
    "Difference",
    "Evidence",
    "Finding",
    "Goodput",
    "Level",
    "LossReport",
    "LossVerdict",
    "Mark",
    "MarkKind",
    "Marked",
    "MissingExtra",
    "NodeOptions",
    "NothingToResume",
    "PassedOver",
    "PastAttempt",
    "PathNotFound",
    "Pick",
    "PickPolicy",
    "Preflight",
    "PruneDecision",
    "Pruned",
    "RankShare",
    "RecoveryCost",
    "Report",
    "Requirements",
    "Reshard",
    "RunHistory",
    "Scan",
    "Sealed",
    "Severity",
    "StatePart",
    "StorageError",
    "StorageOptions",
    "StorageUnavailable",
    "Supervised",
    "TrainOptions",
    "TrainState",
    "UsageError",
    "Verdict",
    "Watched",
    "WorldSize",
    "check_loss",
    "classify",
    "convert",
    "diff",
    "doctor",
    "keep_running",
    "mark",
    "pick",
    "plan_reshard",
    "preflight",
    "prune",
    "recovery_cost",
    "reshard",
    "run_history",
    "scan",
    "seal",
    "show",
    "verify",
    "watch",
]

_HOMES = {
    "ckptctl.selection.pruning": "Pruned prune",
    "ckptctl.supervisor.nodes": "NodeOptions",
    "ckptctl.supervisor.restarting": "keep_running",
    "ckptctl.supervisor.results": "Attempt Supervised",
    "ckptctl.preflight_checks.running": "preflight",
    "ckptctl.preflight_checks.results": "Check Preflight",
    "ckptctl.diagnostics.diagnosing": "doctor",
    "ckptctl.diagnostics.results": "Advice Diagnosis",
    "ckptctl.goodput.estimating": "RecoveryCost recovery_cost",
    "ckptctl.goodput.history": "RunHistory run_history",
    "ckptctl.goodput.timeline": "Goodput PastAttempt",
    "ckptctl.errors": (
        "AccessDenied CkptctlError MissingExtra NothingToResume PathNotFound StorageError "
        "StorageUnavailable UsageError"
    ),
    "ckptctl.failures.classifying": "classify",
    "ckptctl.failures.results": "Classification Evidence",
    "ckptctl.findings": "Finding Report Severity Verdict",
    "ckptctl.formats.own.marks": "Mark MarkKind",
    "ckptctl.selection.marking": "mark",
    "ckptctl.selection.picking": "pick",
    "ckptctl.selection.results": "Answer Contents Marked PassedOver Pick PruneDecision Scan Sealed",
    "ckptctl.selection.scanning": "scan",
    "ckptctl.selection.sealing": "seal",
    "ckptctl.selection.verifying": "show verify",
    "ckptctl.selection.watching": "Watched watch",
    "ckptctl.options": "ContentOptions PickPolicy Requirements StorageOptions TrainOptions",
    "ckptctl.loss.checking": "LossReport check_loss",
    "ckptctl.loss.verdict": "LossVerdict",
    "ckptctl.model": "Level StatePart TrainState WorldSize",
    "ckptctl.resharding.comparing": "diff",
    "ckptctl.resharding.converting": "convert",
    "ckptctl.resharding.results": "Converted Diff Difference RankShare Reshard",
    "ckptctl.resharding.steps": "plan_reshard reshard",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
