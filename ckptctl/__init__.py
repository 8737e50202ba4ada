"""Choose the checkpoint to resume from, and check that the resume worked.

The public names. Importing the package imports neither torch nor s3fs, and a
function only when it is asked for.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""True to type checkers. `typing` takes most of the time until a command can be interrupted."""

if TYPE_CHECKING:
    from ckptctl.diagnostics.advice import Advice as Advice
    from ckptctl.diagnostics.advice import Diagnosis as Diagnosis
    from ckptctl.diagnostics.diagnosing import doctor as doctor
    from ckptctl.errors import AccessDenied as AccessDenied
    from ckptctl.errors import CkptctlError as CkptctlError
    from ckptctl.errors import MissingExtra as MissingExtra
    from ckptctl.errors import NothingToResume as NothingToResume
    from ckptctl.errors import PathNotFound as PathNotFound
    from ckptctl.errors import StorageError as StorageError
    from ckptctl.errors import StorageUnavailable as StorageUnavailable
    from ckptctl.errors import UsageError as UsageError
    from ckptctl.failures.classifying import classify as classify
    from ckptctl.failures.results import Classification as Classification
    from ckptctl.failures.results import Evidence as Evidence
    from ckptctl.findings import Finding as Finding
    from ckptctl.findings import Report as Report
    from ckptctl.findings import Severity as Severity
    from ckptctl.findings import Verdict as Verdict
    from ckptctl.formats.own.marks import Mark as Mark
    from ckptctl.formats.own.marks import MarkKind as MarkKind
    from ckptctl.formats.own.supervision import Attempt as Attempt
    from ckptctl.goodput.data_use import DataUse as DataUse
    from ckptctl.goodput.data_use import data_use as data_use
    from ckptctl.goodput.estimating import RecoveryCost as RecoveryCost
    from ckptctl.goodput.estimating import recovery_cost as recovery_cost
    from ckptctl.goodput.history import Goodput as Goodput
    from ckptctl.goodput.history import PastAttempt as PastAttempt
    from ckptctl.goodput.history import RunHistory as RunHistory
    from ckptctl.goodput.history import run_history as run_history
    from ckptctl.loss.checking import LossReport as LossReport
    from ckptctl.loss.checking import check_loss as check_loss
    from ckptctl.loss.verdict import LossVerdict as LossVerdict
    from ckptctl.model import Level as Level
    from ckptctl.model import StatePart as StatePart
    from ckptctl.model import TrainState as TrainState
    from ckptctl.model import WorldSize as WorldSize
    from ckptctl.options import ContentOptions as ContentOptions
    from ckptctl.options import PickPolicy as PickPolicy
    from ckptctl.options import Requirements as Requirements
    from ckptctl.options import StorageOptions as StorageOptions
    from ckptctl.options import TrainOptions as TrainOptions
    from ckptctl.preflight_checks.results import Check as Check
    from ckptctl.preflight_checks.results import Preflight as Preflight
    from ckptctl.preflight_checks.running import preflight as preflight
    from ckptctl.resharding.comparing import diff as diff
    from ckptctl.resharding.converting import convert as convert
    from ckptctl.resharding.results import Converted as Converted
    from ckptctl.resharding.results import Diff as Diff
    from ckptctl.resharding.results import Difference as Difference
    from ckptctl.resharding.results import RankShare as RankShare
    from ckptctl.resharding.results import Reshard as Reshard
    from ckptctl.resharding.steps import reshard as reshard
    from ckptctl.selection.choosing import Answer as Answer
    from ckptctl.selection.choosing import PassedOver as PassedOver
    from ckptctl.selection.marking import Marked as Marked
    from ckptctl.selection.marking import mark as mark
    from ckptctl.selection.picking import Pick as Pick
    from ckptctl.selection.picking import Scan as Scan
    from ckptctl.selection.picking import pick as pick
    from ckptctl.selection.picking import scan as scan
    from ckptctl.selection.pruning import Pruned as Pruned
    from ckptctl.selection.pruning import prune as prune
    from ckptctl.selection.retention import PruneDecision as PruneDecision
    from ckptctl.selection.sealing import Sealed as Sealed
    from ckptctl.selection.sealing import seal as seal
    from ckptctl.selection.verifying import Contents as Contents
    from ckptctl.selection.verifying import show as show
    from ckptctl.selection.verifying import verify as verify
    from ckptctl.selection.watching import Watched as Watched
    from ckptctl.selection.watching import watch as watch
    from ckptctl.supervisor.nodes import NodeOptions as NodeOptions
    from ckptctl.supervisor.restarting import Supervised as Supervised
    from ckptctl.supervisor.restarting import keep_running as keep_running

__version__ = "0.1.0.dev0"

_HOMES = {
    "ckptctl.selection.pruning": "Pruned prune",
    "ckptctl.supervisor.nodes": "NodeOptions",
    "ckptctl.supervisor.restarting": "Supervised keep_running",
    "ckptctl.preflight_checks.running": "preflight",
    "ckptctl.preflight_checks.results": "Check Preflight",
    "ckptctl.diagnostics.diagnosing": "doctor",
    "ckptctl.diagnostics.advice": "Advice Diagnosis",
    "ckptctl.goodput.estimating": "RecoveryCost recovery_cost",
    "ckptctl.goodput.data_use": "DataUse data_use",
    "ckptctl.goodput.history": "Goodput PastAttempt RunHistory run_history",
    "ckptctl.errors": (
        "AccessDenied CkptctlError MissingExtra NothingToResume PathNotFound StorageError "
        "StorageUnavailable UsageError"
    ),
    "ckptctl.failures.classifying": "classify",
    "ckptctl.failures.results": "Classification Evidence",
    "ckptctl.findings": "Finding Report Severity Verdict",
    "ckptctl.formats.own.marks": "Mark MarkKind",
    "ckptctl.formats.own.supervision": "Attempt",
    "ckptctl.selection.choosing": "Answer PassedOver",
    "ckptctl.selection.marking": "Marked mark",
    "ckptctl.selection.picking": "Pick Scan pick scan",
    "ckptctl.selection.retention": "PruneDecision",
    "ckptctl.selection.sealing": "Sealed seal",
    "ckptctl.selection.verifying": "Contents show verify",
    "ckptctl.selection.watching": "Watched watch",
    "ckptctl.options": "ContentOptions PickPolicy Requirements StorageOptions TrainOptions",
    "ckptctl.loss.checking": "LossReport check_loss",
    "ckptctl.loss.verdict": "LossVerdict",
    "ckptctl.model": "Level StatePart TrainState WorldSize",
    "ckptctl.resharding.comparing": "diff",
    "ckptctl.resharding.converting": "convert",
    "ckptctl.resharding.results": "Converted Diff Difference RankShare Reshard",
    "ckptctl.resharding.steps": "reshard",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
