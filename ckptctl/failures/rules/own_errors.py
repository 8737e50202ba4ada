"""What do the errors mean by which `ckptctl.train` ends a training job?

They are written at the end of a traceback, with the name of their module. Asked before
all other tables: such an error has weighed already what the others would read out of
its words.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

_NEEDLES = ("ckptctl.errors.",)

RULES = (
    Rule(
        "ckptctl.storage",
        "infra-storage",
        Role.ROOT,
        _NEEDLES,
        (
            r"^ckptctl\.errors\.(?:StorageUnavailable|SaveFailed): ",
            r"^ckptctl\.errors\.NothingToResume: .*could not be looked at",
        ),
        "the storage of the checkpoints did not answer",
    ),
    Rule(
        "ckptctl.damaged",
        "bad-checkpoint",
        Role.ROOT,
        _NEEDLES,
        (
            (
                r"^ckptctl\.errors\.(?:StepDamaged|NothingToResume|LoadFailed|RecordUnreadable|"
                r"RecordUnsafe|MetadataUnreadable|MetadataUnsafe|PathEscape): "
            ),
        ),
        "there was no step that could be resumed from",
    ),
    Rule(
        "ckptctl.fenced",
        "job-config",
        Role.ROOT,
        _NEEDLES,
        (r"^ckptctl\.errors\.Fenced: ",),
        "a newer attempt of the job holds the checkpoint root: two were started",
    ),
    Rule(
        "ckptctl.refused",
        "job-config",
        Role.ROOT,
        _NEEDLES,
        (
            (
                r"^ckptctl\.errors\.(?:ModelDiffers|StateRefused|UsageError|PathNotFound|AccessDenied|"
                r"MissingExtra): "
            ),
        ),
        "the job asked for what the checkpoint root does not hold or allow",
    ),
    Rule(
        "ckptctl.gpu",
        "infra-node",
        Role.ROOT,
        _NEEDLES,
        (r"^ckptctl\.errors\.GpuFailed: (?:rank (?P<rank>\d+) on (?P<host>[\w.-]+):)?",),
        "a GPU hung or computed wrongly",
    ),
    Rule(
        "ckptctl.ranks-lost",
        "hang",
        Role.SUSPECT,
        _NEEDLES,
        (r"^ckptctl\.errors\.RanksLost: ",),
        "ranks waited for one that did not come",
    ),
)
