"""Which checkpoint do we resume from, and did the resume work?

The public names. Importing the package imports neither torch nor s3fs, and a
function only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.checkup.examining import doctor
    from ckptctl.checkup.results import Advice, Diagnosis
    from ckptctl.cost.estimating import RecoveryCost, recovery_cost
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
    from ckptctl.failures.evidence import Evidence
    from ckptctl.failures.results import Classification
    from ckptctl.findings import Finding, Report, Severity, Verdict
    from ckptctl.formats.marks import Mark, Word
    from ckptctl.gate.gating import preflight
    from ckptctl.gate.results import Check, Preflight
    from ckptctl.judge.marking import mark
    from ckptctl.judge.picking import pick
    from ckptctl.judge.pruning import Pruned, prune
    from ckptctl.judge.results import Answer, Contents, Marked, PassedOver, Pick, Scan, Sealed
    from ckptctl.judge.retention import Fate
    from ckptctl.judge.scanning import scan
    from ckptctl.judge.sealing import seal
    from ckptctl.judge.showing import show
    from ckptctl.judge.verifying import verify
    from ckptctl.loss.checking import LossReport, check_loss
    from ckptctl.loss.verdict import LossVerdict
    from ckptctl.model import Level, StatePart, TrainState, WorldSize
    from ckptctl.resharding.comparing import diff
    from ckptctl.resharding.converting import convert
    from ckptctl.resharding.results import Converted, Diff, Difference, RankShare, Reshard
    from ckptctl.resharding.steps import plan_reshard, reshard
    from ckptctl.supervise.restarting import Life, Supervised, keep_running

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "Advice",
    "Answer",
    "Check",
    "CkptctlError",
    "Classification",
    "Contents",
    "Converted",
    "Diagnosis",
    "Diff",
    "Difference",
    "Evidence",
    "Fate",
    "Finding",
    "Level",
    "Life",
    "LossReport",
    "LossVerdict",
    "Mark",
    "Marked",
    "MissingExtra",
    "NothingToResume",
    "PassedOver",
    "PathNotFound",
    "Pick",
    "Preflight",
    "Pruned",
    "RankShare",
    "RecoveryCost",
    "Report",
    "Reshard",
    "Scan",
    "Sealed",
    "Severity",
    "StatePart",
    "StorageError",
    "StorageUnavailable",
    "Supervised",
    "TrainState",
    "UsageError",
    "Verdict",
    "Word",
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
    "scan",
    "seal",
    "show",
    "verify",
]

_HOMES = {
    "ckptctl.judge.pruning": "Pruned prune",
    "ckptctl.judge.retention": "Fate",
    "ckptctl.supervise.restarting": "Life Supervised keep_running",
    "ckptctl.gate.gating": "preflight",
    "ckptctl.gate.results": "Check Preflight",
    "ckptctl.checkup.examining": "doctor",
    "ckptctl.checkup.results": "Advice Diagnosis",
    "ckptctl.cost.estimating": "RecoveryCost recovery_cost",
    "ckptctl.errors": (
        "AccessDenied CkptctlError MissingExtra NothingToResume PathNotFound StorageError "
        "StorageUnavailable UsageError"
    ),
    "ckptctl.failures.classifying": "classify",
    "ckptctl.failures.evidence": "Evidence",
    "ckptctl.failures.results": "Classification",
    "ckptctl.findings": "Finding Report Severity Verdict",
    "ckptctl.formats.marks": "Mark Word",
    "ckptctl.judge.marking": "mark",
    "ckptctl.judge.picking": "pick",
    "ckptctl.judge.results": "Answer Contents Marked PassedOver Pick Scan Sealed",
    "ckptctl.judge.scanning": "scan",
    "ckptctl.judge.sealing": "seal",
    "ckptctl.judge.showing": "show",
    "ckptctl.judge.verifying": "verify",
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
